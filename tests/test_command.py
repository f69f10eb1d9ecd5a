"""The `hf-suffix-cache` command: what it prints, and one line on stderr when something is wrong with a model."""

import json
import shutil
import subprocess
import sys

import pytest
import transformers

import hf_suffix_cache
from hf_suffix_cache import __main__ as command
from tiny_models import forget, make_model


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "good"
    model = make_model("llama")
    model.save_pretrained(folder)
    forget(model)  # saving writes into its config
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    """A copy to spoil; nothing is looked for on the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return shutil.copytree(good, tmp_path / "model")


def _edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


# how to spoil a folder, and a word of what is said
SPOILED = {
    "no folder": (shutil.rmtree, "model"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "model"),
    "config that is no json": (lambda folder: (folder / "config.json").write_text("{"), "config"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "weights of three bytes": (lambda folder: _cut(folder / "model.safetensors", 3), "header"),
    "truncated weights": (lambda folder: _cut(folder / "model.safetensors", 5000), "SafetensorError"),
    "other shapes": (lambda folder: _edit_config(folder, hidden_size=32), "mismatch"),
    "unknown type": (lambda folder: _edit_config(folder, model_type="foo"), "foo"),
    "an encoder and decoder": (lambda folder: transformers.T5Config().save_pretrained(folder), "T5Config"),
    "sizes that do not fit": (lambda folder: _edit_config(folder, num_hidden_layers="three"), "num_hidden_layers"),
    "remote code": (
        lambda folder: _edit_config(folder, model_type="foo", auto_map={"AutoConfig": "x.Y"}),
        "trust_remote_code",
    ),
    "a package that is missing": (
        lambda folder: _edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "optimum",
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_model_that_can_not_be_loaded_gives_one_line_and_status_2(how, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimum", None)
    spoil, word = SPOILED[how]
    spoil(folder)
    capsys.readouterr()
    assert command.main(["check", str(folder)]) == 2
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("hf-suffix-cache: ")]
    assert out == "" and len(said) == 1 and "Traceback" not in err
    assert err.rstrip().endswith(said[0])  # the last word is ours; progress and warnings of transformers come before
    assert "could not be loaded as a causal language model" in said[0] and word in said[0]


def test_a_model_that_can_not_be_measured_gives_one_line_and_status_2(folder, capsys, monkeypatch):
    def fail(model):
        raise RuntimeError("out of memory\n  in two lines")

    monkeypatch.setattr("hf_suffix_cache.measurement.measure", fail)
    assert command.main(["check", str(folder)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err == f"hf-suffix-cache: {folder} could not be measured: RuntimeError: out of memory in two lines"


@pytest.mark.parametrize(
    ("kind", "status", "word"), [("llama", 0, "shift"), ("gpt2", 1, "prefix"), ("mamba", 1, "none")]
)
def test_a_good_model_is_measured(kind, status, word, tmp_path, capsys):
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    forget(model)
    assert command.main(["check", str(tmp_path)]) == status
    out = capsys.readouterr().out
    assert out.startswith(f"{type(model).__name__}: {word}")


def test_versions_are_shown(capsys):
    assert command.main(["info"]) == 0
    out = capsys.readouterr().out
    assert hf_suffix_cache.__version__ in out and transformers.__version__ in out


def test_a_process_ends_with_the_status(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hf_suffix_cache", "check", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("hf-suffix-cache: ") == 1 and "Traceback" not in done.stderr
    assert subprocess.run([sys.executable, "-m", "hf_suffix_cache"], capture_output=True).returncode == 2
