"""Small autoregressive requests, and an executor that knows only what it is told to run."""

from stepserve.core.forecast import StepForecast
from stepserve.core.ids import InstanceId, RequestId
from stepserve.core.request import SLO, Family, FinishReason, Progress, Request
from stepserve.core.running import RunningRequest
from stepserve.core.segment import Segment
from stepserve.core.step import StepOutcome

START = Progress()


def ar_request(name="r0", *, prompt=20, output=8, arrival_s=0.0, **slo):
    family = Family.AUTOREGRESSIVE
    return Request(RequestId(name), family, "toy", prompt, output, arrival_s, SLO(**slo))


def forecast_of(output_tokens):
    return StepForecast((1.0,), (float(output_tokens),), float(output_tokens))


def ar_running(program, request, progress=START, *, stop=None, **fields):
    """A request as an instance holds it."""
    forecast = forecast_of(request.max_output_tokens)
    return RunningRequest(
        request=request,
        segment=Segment(request.id, 0, progress.settled, stop, InstanceId("i0"), 1),
        progress=progress,
        forecast=forecast,
        heavy_tokens=program.heavy_tokens(request),
        light_tokens=program.light_tokens(request),
        heavy_left=program.heavy_left(request, progress, forecast.output_tokens),
        forecast_settled=progress.settled,
        **fields,
    )


class TokenRow:
    """One request on one instance: refuses inputs whose predecessors have no keys and values."""

    def __init__(self, request, *, held=0, emitted=0, ends_at=None):
        self.request, self.held, self.emitted = request, held, emitted
        self.ends_at = ends_at or request.max_output_tokens

    def run(self, step):
        """The outcome; a step that ends at the last known token samples one."""
        known = self.request.prompt_tokens + self.emitted
        assert step.query_tokens >= 1
        assert step.context_tokens - step.query_tokens == self.held, "inputs follow on"
        assert step.context_tokens <= known, "nothing beyond what is known"
        if not step.kind.heavy:
            assert (step.query_tokens, step.context_tokens) == (1, known)
        self.held = step.context_tokens
        self.emitted += self.held == known
        finished = FinishReason.LENGTH if self.emitted == self.ends_at else None
        return StepOutcome(self.request.id, step.query_tokens, self.emitted, finished)
