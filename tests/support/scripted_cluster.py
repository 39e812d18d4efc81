"""A global scheduler told one event at a time; forecasts are answered at once."""

from stepserve.control.ledger import ClaimKind
from stepserve.core.actions import Predict, Send
from stepserve.core.events import InstanceReported, InstanceUp, Predicted, RequestArrived
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.instance import InstanceSpec, RunningReport
from stepserve.core.plan import Slot
from stepserve.core.request import (
    SLO,
    DiffusionOptions,
    Family,
    FinishReason,
    OnMiss,
    Progress,
    Request,
    ThresholdBounds,
)
from stepserve.cost.step_table import StepProfile, StepTable
from stepserve.families.assemble import assemble_global
from stepserve.families.diffusion import DIFFUSION
from support.parts import make_control

SIZES = (64, 128, 256, 512, 1024, 4096)
PROFILE = StepProfile(SIZES, tuple(size * 3e-5 for size in SIZES), "made up")


def slot_spec(*gpus, node=0):
    """An instance on GPUs of a node."""
    name = InstanceId(f"node{node}-gpu{'.'.join(map(str, gpus))}")
    return InstanceSpec(name, len(gpus), 1000 * len(gpus), 16, 8, Slot(node, tuple(gpus)))


def request(
    name, *, prompt=20, output=48, arrival_s=0.0, e2e_s=10.0, floor=0.5, on_miss=OnMiss.DEGRADE
):
    options = DiffusionOptions(ThresholdBounds(0.9, floor), block_tokens=16)
    slo = SLO(e2e_s=e2e_s, on_miss=on_miss)
    return Request(RequestId(name), Family.DIFFUSION, "m", prompt, output, arrival_s, slo, options)


class ScriptedCluster:
    """Returns the actions of each event, those of the answered forecasts included."""

    profile = PROFILE

    def __init__(self, *specs, now_s=0.0, **config):
        config = make_control(tp_degrees=(1, 2), **config)
        self.scheduler = assemble_global(
            DIFFUSION, config, StepTable(dict.fromkeys((1, 2), self.profile))
        )
        self.now_s = now_s
        for spec in specs:
            self.tell(InstanceUp(spec))

    def tell(self, event):
        actions = []
        for action in self.scheduler.handle(self.now_s, event):
            if isinstance(action, Predict):
                steps = tuple(float(20 - i) for i in range(len(action.thresholds)))
                forecast = StepForecast(action.thresholds, steps, 48.0, action.progress.steps)
                actions += self.tell(Predicted(action.request.id, forecast))
            else:
                actions.append(action)
        return actions

    def arrive(self, name, **options):
        return self.tell(RequestArrived(request(name, arrival_s=self.now_s, **options)))

    def report(self, instance, *, settled=20, finished=()):
        """The instance's periodic report: everybody placed there has come to ``settled``.

        ``finished``: the names of those whose last step has been run.
        """
        ends = dict.fromkeys(finished, FinishReason.STOP)
        ledger = self.scheduler.ledger
        rows = tuple(
            RunningReport(r, t.epoch, Progress(settled, 0, 1, ends.get(r)), t.forecast)
            for r in ledger.instances[instance].held(ClaimKind.RUNNING)
            if (t := ledger.requests[r])
        )
        return self.tell(InstanceReported(instance, self.now_s, None, rows))

    def segments(self):
        """Where every placed request is."""
        return {r: t.segment for r, t in self.scheduler.ledger.requests.items()}


def sent(actions, kind):
    """Events of a kind among what is sent to instances."""
    return [(a.to, a.event) for a in actions if isinstance(a, Send) and isinstance(a.event, kind)]
