"""How long things take that no cost model knows."""

from dataclasses import dataclass

from stepserve.core.bounds import Bounded, NotNegative


@dataclass(frozen=True, slots=True)
class Delays(Bounded, path="setting.delays"):
    """From asking for something to having it (DiLaServe C6, DiLaServe C7, DiLaServe C9).

    ``message_s`` is one way between schedulers; ``predict_s`` covers asking and answering;
    ``detect_s`` passes between the loss of an instance and the news of it; ``rebuild_s`` until
    a new instance is up: 60 to 90 s for weights, processes and graph capture. Until
    ``warm_up_s`` of a run no step ends: what the first batches of a fresh process wait for.
    It is not told as time of a step: nobody is to learn from it.
    """

    message_s: NotNegative = 0.0005
    predict_s: NotNegative = 0.001
    plan_s: NotNegative = 5.0
    stop_s: NotNegative = 5.0
    rebuild_s: NotNegative = 75.0
    detect_s: NotNegative = 1.0
    warm_up_s: NotNegative = 0.0
