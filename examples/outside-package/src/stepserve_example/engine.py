"""An engine without torch: its two models, one of each family, choose letters by hashes."""

from collections.abc import Sequence
from pathlib import Path

from stepserve.core.config import NoOptions, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.instance import InstanceSpec
from stepserve.core.model import ModelFacts
from stepserve.core.request import Family

from .autoregressive import HashAutoregressive
from .diffusion import HashDiffusion
from .hashes import END, KEY_BYTES, MASK


class HashEngine:
    """An ``Engine``; ``model`` is the name of a family."""

    Options = NoOptions

    def __init__(self, options: NoOptions, config: ServeConfig) -> None:
        """Raises FieldError for another model."""
        if config.model not in list(Family):
            what = f"{config.model!r} is not known to this engine: must be {' or '.join(Family)}"
            raise FieldError("model", what)
        self.facts = facts_of(Family(config.model))

    def check(self, degrees: Sequence[int]) -> None:
        """See ``Engine.check``: there is nothing to load, nor to split."""
        if max(degrees) > 1:
            raise FieldError("layout", "this engine has instances of degree 1 alone")

    def executor(self, spec: InstanceSpec, threads: int) -> HashAutoregressive | HashDiffusion:
        """See ``Engine.executor``."""
        diffusion = self.facts.family is Family.DIFFUSION
        return (HashDiffusion if diffusion else HashAutoregressive)(spec.page_tokens)


def facts_of(family: Family) -> ModelFacts:
    """Both models have the same tokens: bytes, then an end and a mask."""
    diffusion = family is Family.DIFFUSION
    return ModelFacts(
        name=f"hash-{family}",
        family=family,
        folder=Path(__file__).parent / "model",
        context_tokens=4096,
        vocab_size=MASK + 1,
        eos_token_ids=(END,),
        default_max_tokens=64,
        mask_token_id=MASK if diffusion else None,
        block_lengths=(8, 16, 32) if diffusion else (),
        default_block_length=16,
        block_causal=False,
        layers=1,
        hidden_size=KEY_BYTES,
        parameters=KEY_BYTES,
        weight_bytes=KEY_BYTES,
        kv_bytes_per_token=KEY_BYTES,
    )
