"""Whether a model's published tensors fit its config, by their names: a program that answers one request (JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.train.model import pretrained
from muster.train.model.causal_lm import on_meta, read_config


def main() -> None:
    request = json.load(sys.stdin)
    folder, answer = Path(request["folder"]), {}
    try:
        model = on_meta(read_config(RunSpec.model_validate(request["spec"]), folder, 1), torch.float32)
        names = request["names"]
        stored = (
            pretrained.open_folder(folder) if names is None else pretrained.Folder(folder, dict.fromkeys(names, folder))
        )
        pretrained.found_views(model, stored)
    except MusterError as error:
        answer = {"problem": str(error), "hint": error.hint}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
