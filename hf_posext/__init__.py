"""Context extension for loaded transformers models: change how position is encoded, in place and reversibly."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posext import functional
    from hf_posext.diagnosis import DiagnosisReport, diagnose
    from hf_posext.errors import NoSiteError, PatchError, TrainingError
    from hf_posext.evaluation.comparison import compare
    from hf_posext.evaluation.comparison_report import ComparisonReport
    from hf_posext.evaluation.longppl import LongPplReport, longppl
    from hf_posext.evaluation.passkey import PasskeyReport, passkey
    from hf_posext.evaluation.perplexity import PerplexityReport, perplexity
    from hf_posext.evaluation.pseudo_perplexity import PseudoPerplexityReport, pseudo_perplexity
    from hf_posext.freezing import fixed_length, scale_for
    from hf_posext.gating import gate_adapter, ungate_adapter
    from hf_posext.inspection import PositionReport, inspect_model, list_methods
    from hf_posext.loading import export_config, load_pretrained
    from hf_posext.patching import patch_model, patched, suspended, unpatch_model
    from hf_posext.records import PatchRecord, record_of, write_record
    from hf_posext.suggestion import Suggestion, suggest
    from hf_posext.training.config import FinetuneConfig
    from hf_posext.training.finetune import finetune
    from hf_posext.training.result import FinetuneResult

# Name -> module that defines it; imported on first use, so that `import hf_posext` costs nothing.
_WHERE = {
    "ComparisonReport": "evaluation.comparison_report",
    "DiagnosisReport": "diagnosis",
    "FinetuneConfig": "training.config",
    "FinetuneResult": "training.result",
    "LongPplReport": "evaluation.longppl",
    "NoSiteError": "errors",
    "PasskeyReport": "evaluation.passkey",
    "PatchError": "errors",
    "PatchRecord": "records",
    "PerplexityReport": "evaluation.perplexity",
    "PositionReport": "inspection",
    "PseudoPerplexityReport": "evaluation.pseudo_perplexity",
    "Suggestion": "suggestion",
    "TrainingError": "errors",
    "compare": "evaluation.comparison",
    "diagnose": "diagnosis",
    "export_config": "loading",
    "finetune": "training.finetune",
    "fixed_length": "freezing",
    "gate_adapter": "gating",
    "inspect_model": "inspection",
    "list_methods": "inspection",
    "load_pretrained": "loading",
    "longppl": "evaluation.longppl",
    "passkey": "evaluation.passkey",
    "patch_model": "patching",
    "patched": "patching",
    "perplexity": "evaluation.perplexity",
    "pseudo_perplexity": "evaluation.pseudo_perplexity",
    "record_of": "records",
    "scale_for": "freezing",
    "suggest": "suggestion",
    "suspended": "patching",
    "ungate_adapter": "gating",
    "unpatch_model": "patching",
    "write_record": "records",
}

__all__ = [
    "ComparisonReport",
    "DiagnosisReport",
    "FinetuneConfig",
    "FinetuneResult",
    "LongPplReport",
    "NoSiteError",
    "PasskeyReport",
    "PatchError",
    "PatchRecord",
    "PerplexityReport",
    "PositionReport",
    "PseudoPerplexityReport",
    "Suggestion",
    "TrainingError",
    "compare",
    "diagnose",
    "export_config",
    "finetune",
    "fixed_length",
    "functional",
    "gate_adapter",
    "inspect_model",
    "list_methods",
    "load_pretrained",
    "longppl",
    "passkey",
    "patch_model",
    "patched",
    "perplexity",
    "pseudo_perplexity",
    "record_of",
    "scale_for",
    "suggest",
    "suspended",
    "ungate_adapter",
    "unpatch_model",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("hf_posext")
    if name == "functional":
        return import_module("hf_posext.functional")
    if name in _WHERE:
        return getattr(import_module(f"hf_posext.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'hf_posext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
