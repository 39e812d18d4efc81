"""The two-node example says what the package understands."""

from pathlib import Path

import yaml

from stepserve.cli.main import _parser
from stepserve.cli.serve import configuration
from stepserve.core.config import ServeConfig
from stepserve.files import read_toml
from stepserve.tables import from_table

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/ray-two-nodes"


def manifests():
    return {m["kind"]: m for m in yaml.safe_load_all((EXAMPLE / "kuberay.yaml").read_text())}


def cpus(pod):
    return sum(int(c["resources"]["requests"]["cpu"]) for c in pod["spec"]["containers"])


def test_the_layout_is_a_configuration():
    config = from_table(ServeConfig, read_toml(EXAMPLE / "serve.toml", "config"))
    assert config.cluster == "ray://auto"
    assert config.instances * config.threads_per_instance == 2 * 4


def test_the_manifest_starts_as_many_instances_as_its_nodes_hold():
    found = manifests()
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    join, _, serve = container["args"][0].partition(" && exec stepserve ")
    arguments = serve.split()
    config = configuration(_parser("serve").parse_args(arguments))
    (group,) = found["RayCluster"]["spec"]["workerGroupSpecs"]
    room = group["replicas"] * (cpus(group["template"]) // config.threads_per_instance)
    assert config.instances == room
    name = found["RayCluster"]["metadata"]["name"]
    assert config.cluster == "ray://auto"
    assert f"--address={name}-head-svc:6379" in join
    assert container["ports"][0]["containerPort"] == config.port


def test_every_ray_is_the_one_that_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line.partition("==")[2] for line in lines if line.startswith("ray=="))
    assert manifests()["RayCluster"]["spec"]["rayVersion"] == version
    assert f"FROM rayproject/ray:{version}-" in (EXAMPLE / "Dockerfile").read_text()
