"""The model under diagnosis, and how checks read a text with it without leaving a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posext import mechanisms
from hf_posext.attention.reading import adapters
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NotApplicableError
from hf_posext.evaluation.forwards import device_of, evaluating
from hf_posext.inspection import is_in_force
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.mechanisms.rotary import LENGTH_DEPENDENT, rope_type
from hf_posext.probe import unmoved, vocabulary_size
from hf_posext.records import PatchRecord, record_of
from hf_posext.spans import length_of

TOKENS = 12  # of the texts that checks read, where a model can read so many
ROOM = 64  # tokens that a model is taken to read where nothing says how many
FIRST_TEXT_TOKEN = 5  # lower ids are often padding, begin, end and mask


@dataclass(frozen=True)
class Subject:
    """A model under diagnosis.

    Attributes:
        model: as it was given.
        root: the outermost transformers model in it.
        tokenizer: its own, None where none was given.
        sites: where position is encoded.
        record: of its patch, None without one.
        trained_length: N in tokens, None where nothing says it.
    """

    model: nn.Module
    root: PreTrainedModel
    tokenizer: Any
    sites: list[Site]
    record: PatchRecord | None
    trained_length: int | None

    @property
    def in_force(self) -> bool:
        """Whether there is a patch and the modules act as its record says."""
        return self.record is not None and is_in_force(self.root, self.record.native, self.sites)

    @property
    def usable_length(self) -> int | None:
        """T in tokens that the model is to read now: that of a patch in force, else N."""
        return self.record.target_length if self.record is not None and self.in_force else self.trained_length

    @property
    def target(self) -> int:
        """T in tokens.

        Raises:
            NotApplicableError: nothing says it.
        """
        if self.usable_length is None:
            raise NotApplicableError("The config does not say for how many tokens the model was trained.")
        return self.usable_length

    @property
    def rotary(self) -> list[Site]:
        """Rotary sites that rotate.

        Raises:
            NotApplicableError: none.
        """
        found = [site for site in self.sites if site.mechanism == "rotary" and not mechanisms.is_off(site)]
        if not found:
            raise NotApplicableError("The model does not rotate queries and keys.")
        if any(getattr(site.module, site.field).is_meta for site in found):
            raise NotApplicableError("The model is on the meta device and has no values; load the weights first.")
        return found

    @property
    def with_frequencies(self) -> list[Site]:
        """Rotary sites that hold frequencies.

        Raises:
            NotApplicableError: none.
        """
        found = [site for site in self.rotary if not mechanisms.is_finite(site)]
        if not found:
            raise NotApplicableError(
                "The rotation comes from a table of sines and cosines, which holds no frequencies."
            )
        return found

    @property
    def tables(self) -> list[Site]:
        """Tables of rows that are added to the hidden states.

        Raises:
            NotApplicableError: none that is in use.
        """
        found = [site for site in self.sites if mechanisms.has_rows(site) and not mechanisms.is_off(site)]
        if not found:
            raise NotApplicableError("The model adds no table of positions to its hidden states.")
        return found

    @property
    def short_length(self) -> int:
        """Tokens that can be read before anything switches with the length: T, or less by a checkpoint's own type."""
        room = self.usable_length or ROOM
        rotary = [site for site in self.sites if site.mechanism == "rotary"]
        if any(rope_type(site) in LENGTH_DEPENDENT for site in rotary):
            room = min(room, self.trained_length or room)
        return min([room, *(mechanisms.short_length(site) or room for site in rotary)])

    @property
    def acts_in_attention(self) -> bool:
        """Whether a patch does something to queries, keys or logits as attention is entered."""
        return bool(adapters(self.root))

    @cached_property
    def accepted(self) -> Mapping[str, inspect.Parameter]:
        """Arguments of the model's forward."""
        return inspect.signature(self.root.forward).parameters

    @property
    def noise(self) -> float:
        """Relative difference that rounding alone may make, in the dtype of the model."""
        return noise_of(self.root.dtype)

    def owners(self) -> list[PreTrainedModel]:
        """The sub-models that own the sites, each once."""
        mine = {id(site.module) for site in self.sites}
        found = [each.owner for each in scoped_modules(self.root) if id(each.module) in mine]
        return list({id(owner): owner for owner in found}.values())

    def text(self, length: int = TOKENS, first: int = FIRST_TEXT_TOKEN) -> Tensor:
        """[1, L] token ids, the same each time, none of them padding, no two neighbours alike."""
        count = vocabulary_size(self.root.config)
        low = min(first, count // 2)
        steps = torch.randint(1, count - low, (length,), generator=torch.Generator().manual_seed(0))
        return (low + steps.cumsum(0) % (count - low))[None].to(device_of(self.root))

    def run(self, ids: Tensor, **more: Any) -> Any:
        """What the model's forward gives for token ids [B, L].

        Raises:
            NotApplicableError: it cannot run on token ids alone.
        """
        inputs = {"input_ids": ids, "use_cache": False, **more}
        if "decoder_input_ids" in self.accepted:
            inputs.setdefault("decoder_input_ids", ids)
            if "attention_mask" in more:
                inputs["decoder_attention_mask"] = more["attention_mask"]
        passed_on = set(inputs) if any(each.kind is each.VAR_KEYWORD for each in self.accepted.values()) else set()
        passed_on -= {"decoder_attention_mask"}
        kept = {name: value for name, value in inputs.items() if name in {*self.accepted, *passed_on}}
        try:
            with unmoved(mechanisms.find_sites(self.root)):
                return self.root(**kept)
        except Exception as error:  # whatever a foreign forward raises
            reason = " ".join(str(error).split()) or type(error).__name__
            raise NotApplicableError(f"The model could not run on token ids alone ({reason[:200]}).") from error

    def read(self, ids: Tensor, **more: Any) -> Tensor:
        """`first_of` what the forward gives: logits or hidden states, [B, L, V or W] float32 on the CPU."""
        return first_of(self.run(ids, **more))


def first_of(output: Any) -> Tensor:
    """Logits, or what a model gives first where it has none, float32 on the CPU.

    Raises:
        NotApplicableError: that is no tensor with a token axis.
    """
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0]
    if not torch.is_tensor(found) or found.dim() != 3:
        raise NotApplicableError("The model gives nothing for each token.")
    return found.detach().float().cpu()


def noise_of(dtype: torch.dtype) -> float:
    """Relative difference that rounding alone may make."""
    return max(1e-4, 6 * torch.finfo(dtype).eps)


def apart(one: Tensor, other: Tensor) -> float:
    """Norm of a difference over the norm of the first."""
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


def make_subject(model: nn.Module, tokenizer: Any) -> Subject:
    """A model with what was found in it.

    Raises:
        TypeError: not a transformers model.
    """
    root = mechanisms.root_model(model)
    record = record_of(root)
    length = record.trained_length if record else length_of(model)
    return Subject(model, root, tokenizer, mechanisms.find_sites(model), record, length)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; flags of training and the random state are as before in the end."""
    every_gpu = range(torch.cuda.device_count())  # named, since leaving them out warns where there are several
    with torch.no_grad(), torch.random.fork_rng(devices=every_gpu), evaluating(model):
        torch.manual_seed(0)
        yield
