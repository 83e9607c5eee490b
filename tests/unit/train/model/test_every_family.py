"""Every family: from random weights, with adapters on a folder, merged, exported, reloaded as transformers has it."""

import json

import pytest
import torch
from every_family import COVERING, DOCS, check, families, line, spec
from fakes.small_model import process_group
from thorough import usually

from muster.app.planning.model_shape import unfit
from muster.core.errors import UsageError
from muster.train.model.causal_lm import read_config


@pytest.fixture(autouse=True)
def _alone():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with process_group():
        yield
    torch.set_num_threads(before)


#: All of them at night.
NAMES = (usually(0, nightly=1) and tuple(families())) or COVERING


@pytest.mark.parametrize("family", NAMES)
def test_it_trains_is_exported_and_reloaded_as_transformers_computes_it(family, tmp_path):
    result = check(family, tmp_path)
    assert result.loss < 1e-4 and result.gradient < 1e-3 and result.lora < 1e-4 and result.exported < 1e-4, result
    table = DOCS.read_text().splitlines()
    assert line(family, result) in table, f"{DOCS} is not what every_family.py writes"


def test_at_least_ninety_share_rows_and_none_is_missing_in_the_table():
    rows = [each for each in DOCS.read_text().splitlines() if each.startswith("| ")][1:]
    assert len(rows) == len(families()) >= 127
    assert sum("| packed |" in each for each in rows) >= 90


@pytest.mark.parametrize("family", ["xlnet", "xlm", "cpmant", "prophetnet", "reformer", "blt", "mllama", "emu3"])
def test_others_are_refused_in_one_line(family):
    with pytest.raises(UsageError, match=rf"^model: {family} ") as caught:
        read_config(spec({"model_type": family}), None, 1)
    assert "\n" not in str(caught.value)
    [problem] = unfit(spec({"model_type": family}))
    assert problem.key == "model.config" and problem.message.startswith(family), "nor planned or submitted"


def test_a_family_that_tpus_do_not_train_is_not_submitted():
    run = spec({"model_type": "mixtral", "num_local_experts": 4})
    [problem] = unfit(run.model_copy(update={"resources": run.resources.model_copy(update={"device": "tpu"})}))
    assert problem.key == "model.config" and "this is mixtral" in problem.message


def test_a_folder_of_another_quantisation_is_not_submitted(tmp_path):
    quantised = {"model_type": "llama", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    [problem] = unfit(spec(None, source=str(tmp_path)))
    assert (problem.key, problem.message) == ("model.source", "weights quantised by awq are not trained")
