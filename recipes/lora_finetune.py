# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""Tunes a patched model for a short while, on one process or many: the same as `posext finetune CONFIG`.

    python recipes/lora_finetune.py --config recipes/configs/tiny.yaml
    accelerate launch --num_processes 2 recipes/lora_finetune.py --config recipes/configs/tiny.yaml
    accelerate launch --config_file recipes/configs/fsdp.yaml recipes/lora_finetune.py --config CONFIG.yaml

`--set KEY=VALUE` overrides a key of the config, `--set training.max_steps=50`. The run goes on where it was stopped.
It prints perplexity before and after, and leaves in `output_dir` the adapter with its `posext.json`, `report.json`
and `plot.png`; `tiny.yaml` takes about two minutes on one core.
"""

from __future__ import annotations

import argparse

import transformers
from accelerate import PartialState

from hf_posext import FinetuneConfig, finetune
from hf_posext.demo import demo_path

DEMO = "demo:"


def main() -> None:
    """Reads the config, loads the model, tunes it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides a key; repeatable")
    arguments = parser.parse_args()

    config = FinetuneConfig.from_yaml(arguments.config, arguments.set)
    if config.model is None:
        parser.error("the config names no `model`: add it, or --set model=PATH")
    path = str(demo_path(config.model.removeprefix(DEMO))) if config.model.startswith(DEMO) else config.model
    model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model = model_class.from_pretrained(path, dtype="bfloat16" if config.training.get("bf16") else "float32")
    result = finetune(model, transformers.AutoTokenizer.from_pretrained(path), None, config)
    if PartialState().is_main_process:
        print(result)


if __name__ == "__main__":
    main()
