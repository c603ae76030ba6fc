"""The shape of a Llama, in the words of Hugging Face's ``config.json``, read from such a folder and written to one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import TrainerConfigError
from ..options import check_range
from ..weights.run_folder import CONFIG_NAME
from .experts import ExpertsConfig

ARCHITECTURE, MODEL_TYPE = "LlamaForCausalLM", "llama"
EXPERTS_ARCHITECTURE, EXPERTS_MODEL_TYPE = "LlamaWithExperts", "llama_with_experts"
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# What a config.json may say of parts that this model does not have, and the one value by which it is this model.
_FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
# Keys that say nothing of the weights that will be written, or are written anew.
_LEFT_OUT = ("_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of the model; names and meanings are those of ``transformers.LlamaConfig``.

    Raises:
        TrainerConfigError: sizes that do not go together, naming key, value and cure.
    """

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    """Heads of keys and values, each of which serves as many heads of queries; none: one for each."""

    head_dim: int | None = None
    """Width of a head; none: hidden_size / num_attention_heads."""

    max_position_embeddings: int = 2048
    """The longest sequence that the model takes."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    """Llama 3's stretched frequencies: rope_type="llama3" and LLAMA3_SCALING; none: as they are."""

    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""

    experts: ExpertsConfig | None = None
    """Mixtures of experts in place of the feed-forward layers; none: no experts, as transformers' Llama."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a config.json says besides, such as ids of tokens; written as it was read."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise TrainerConfigError(f"{name}={value!r} is no whole number; give one from 1 on")
            check_range(name, value, low=1)
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            check_range(name, getattr(self, name), low=0.0, above=True)
        heads, groups = self.num_attention_heads, self.key_value_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise TrainerConfigError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}; use hidden_size="
                f"{max(1, self.hidden_size // heads) * heads}, or give head_dim"
            )
        if heads % groups:
            raise TrainerConfigError(
                f"num_key_value_heads={groups} does not divide num_attention_heads={heads}; each serves as many heads"
            )
        if self.head_width % 2:
            raise TrainerConfigError(f"head_dim={self.head_width} is odd, and rotations turn pairs; use an even one")
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def key_value_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def to_json_string(self) -> str:
        """The text of a ``config.json``, from which transformers makes the same model; it has none with experts."""
        own = {name: value for name, value in asdict(replace(self, extra={})).items() if name != "extra"}
        own |= {"num_key_value_heads": self.key_value_heads, "head_dim": self.head_width}
        named: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        if self.experts is None:
            del own["experts"]
        else:
            named = {"architectures": [EXPERTS_ARCHITECTURE], "model_type": EXPERTS_MODEL_TYPE}
        return json.dumps({**self.extra, **named, **own}, indent=2, sort_keys=True) + "\n"

    @staticmethod
    def _check_scaling(scaling: Mapping[str, Any]) -> None:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "llama3":
            raise TrainerConfigError(f"rope_scaling has rope_type={kind!r}; known is 'llama3', or leave it out")
        for name in LLAMA3_SCALING:
            if not isinstance(scaling.get(name), (int, float)):
                raise TrainerConfigError(f"rope_scaling.{name}={scaling.get(name)!r} is no number; 'llama3' needs it")
            check_range(f"rope_scaling.{name}", scaling[name], low=0.0, above=True)
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise TrainerConfigError(
                f"rope_scaling.high_freq_factor={scaling['high_freq_factor']} is not above low_freq_factor="
                f"{scaling['low_freq_factor']}; between the two, frequencies go over from one to the other"
            )


def read_llama_config(folder: str) -> LlamaConfig:
    """The shape of the model in a folder of Hugging Face; its weights are read by ``trainer.init_from``.

    Raises:
        TrainerConfigError: there is no ``config.json``, or it is of another model; the message names which, and the key
            by which it differs.
    """
    path = Path(folder) / CONFIG_NAME
    try:
        given = json.loads(path.read_bytes())
    except OSError as exc:
        raise TrainerConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise TrainerConfigError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise TrainerConfigError(f"{path} is no table of keys; give a folder that save_pretrained wrote")
    kind, architectures = given.get("model_type"), given.get("architectures") or [ARCHITECTURE]
    if kind != MODEL_TYPE or architectures != [ARCHITECTURE]:
        raise TrainerConfigError(
            f"{path} is of {', '.join(map(str, architectures)) if given.get('architectures') else 'a model'} "
            f"(model_type={kind!r}), and the recipe has {ARCHITECTURE} (model_type={MODEL_TYPE!r}) alone; name your "
            "own model with model.use"
        )
    for name, value in _FIXED.items():
        if given.get(name, value) != value:
            raise TrainerConfigError(
                f"{path} has {name}={given[name]!r}, and the recipe's model has {name}={value!r} alone; name your own "
                "model with model.use"
            )
    absent = sorted({"vocab_size", "hidden_size", "num_hidden_layers"} - given.keys())
    if absent:
        raise TrainerConfigError(f"{path} lacks {', '.join(absent)}; give a folder that save_pretrained wrote")
    rope = given.get("rope_parameters") or {}  # where newer versions of transformers keep both
    scaling = given.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = None
    own = {one.name for one in fields(LlamaConfig)} - {"experts", "extra", "rope_scaling", "rope_theta"}
    # What the file leaves out is what transformers takes it for.
    values: dict[str, Any] = {"intermediate_size": 11008, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
    values |= {name: value for name, value in given.items() if name in own}
    taken = own | {"rope_parameters", "rope_scaling", "rope_theta", *_LEFT_OUT}
    try:
        return LlamaConfig(
            **values,
            rope_theta=given.get("rope_theta", rope.get("rope_theta", 10_000.0)),
            rope_scaling=scaling and {name: value for name, value in scaling.items() if name != "rope_theta"},
            extra={name: value for name, value in given.items() if name not in taken},
        )
    except TrainerConfigError as exc:
        raise TrainerConfigError(f"{path}: {exc}") from exc
