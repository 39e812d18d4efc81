"""``stepserve serve``: a cluster, here or on Ray, behind an OpenAI-compatible API."""

import argparse
import logging
from pathlib import Path

from stepserve.cli.options import check_output
from stepserve.core.config import Choice, ServeConfig
from stepserve.files import read_toml
from stepserve.tables import from_table

OPTIONS = {
    "model": "'bundled', or the folder of a checkpoint in Hugging Face layout",
    "served_model_name": "the model's id in requests, replies and metrics; its own name without",
    "host": "address to listen on",
    "port": "port to listen on",
    "gateways": "processes that speak HTTP, all on the one port",
    "instances": "model instances, of degree 1",
    "layout": "in their place, the tensor-parallel degree of each instance, such as 2,1: so many "
    "shares of the model, each a process, or a GPU",
    "cluster": "where they live: local (a process each), threads (of this process), ray "
    "(started here), ray://auto (the Ray "
    "cluster that this machine is a node of) or ray://HOST:PORT (the same, by its head's address)",
    "threads_per_instance": "CPU threads of each instance, or share of one; 0: the cores evenly",
    "device": "torch device, such as cpu or cuda:0",
    "dtype": "float32, float16 or bfloat16",
    "profile": "step-time table from `stepserve profile`, if the model's folder has none",
    "keep_profile": "autoregressive batch times: read at start if there, written at the end",
    "predictor": "of remaining steps: mean, boosted; of autoregressive models hinted, class_mean, "
    "longest; auto: the best that there is",
    "events": "write every event and decision to this file (.gz: compressed); older ones are kept"
    " beside it, see events_bytes and events_keep of the configuration",
    "log_steps": "write every executed step to this file, to train a predictor on",
    "log_format": "of the log on standard error: text, or json for an object a line",
    "operator_api": "serve /cluster on a port of its own: state of the instances, changes of the "
    "layout",
    "operator_port": "port of /cluster; 0: the one after the clients' port",
    "tenants": "file of API keys, limits and weights of tenants; without it everybody is let in",
    "ssl_certfile": "PEM file of a certificate, to serve over TLS",
    "ssl_keyfile": "PEM file of its private key",
    "max_running_requests": "most requests that one instance steps at a time",
    "kv_pages": "KV pages of each instance",
}
POLICIES = {
    "placement": ("--placement-policy", "placement policy"),
    "batching": ("--batching-policy", "batching policy"),
    "threshold": ("--threshold-policy", "threshold policy"),
    "load_control": ("--load-control", "policy of the threshold caps; none: no caps"),
    "migration": ("--migration", "none, recompute_step or any_step"),
    "planner": ("--planner", "of the layout: none, greedy or capacity_ilp"),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser. Options override the configuration file."""
    parser = subparsers.add_parser("serve", help="serve a model under latency deadlines")
    parser.add_argument("--config", type=Path, help="TOML file with the keys of ServeConfig")
    defaults = ServeConfig()
    for name, text in OPTIONS.items():
        default = getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_const", const=True, help=text)
            continue
        part = isinstance(default, Choice)
        shown = default.use if part else default
        more = f" (default {shown})" if shown != "" else ""
        parser.add_argument(flag, type=str if part else type(default), help=text + more)
    for name, (flag, text) in POLICIES.items():
        parser.add_argument(flag, dest=name, metavar="POLICY", help=text)
    engine = "what runs the steps: torch, another package's, or package.module:Class"
    parser.add_argument("--engine", help=f"{engine} (default torch)")
    every = f"seconds between plans (default {defaults.control.plan_every_s:g})"
    parser.add_argument("--plan-every", dest="plan_every_s", type=float, help=every)
    parser.add_argument("--verbose", action="store_true", help="log every decision and its why")


def configuration(args: argparse.Namespace) -> ServeConfig:
    """The configuration file, if any, under the options given."""
    table = read_toml(args.config, "config") if args.config else {}
    config = from_table(ServeConfig, table)
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {name: given[name] for name in (*OPTIONS, "engine") if name in given}
    control = {name: given[name] for name in (*POLICIES, "plan_every_s") if name in given}
    return from_table(ServeConfig, {**options, "control": control}, base=config)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    from stepserve.live.logs import log_to_stderr

    config = configuration(args)
    for name in ("events", "log_steps", "keep_profile"):
        check_output(name, Path(getattr(config, name)) if getattr(config, name) else None)
    log_to_stderr(logging.DEBUG if args.verbose else logging.INFO, config.log_format)
    from stepserve.gateway.tenants import with_weights

    config = with_weights(config)
    if config.cluster == "local":
        from stepserve.live.processes import serve_processes

        return serve_processes(config)
    from stepserve.live.deploy import serve

    if config.cluster == "threads":
        return serve(config)
    from stepserve.live.transport_ray import RayCluster

    with RayCluster(config) as cluster:
        return serve(cluster.config, cluster.transport)
