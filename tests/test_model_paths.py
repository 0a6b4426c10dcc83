"""What a model's name may be, and what is said when it is none of them."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import pytest

from cw_lens.models import ModelLoadError, load_model

HUB_SCRIPT = """
import sys
from cw_lens import model_paths
from cw_lens.models import ModelLoadError, load_model
model_paths.HUB_SECONDS = 1
for name in sys.argv[1:]:
    try:
        print("loaded", load_model(name).cfg.n_layers)
    except ModelLoadError as error:
        print(error)
"""


def test_a_silent_hub_is_asked_once_and_its_cache_serves(folder, tmp_path):
    """A hub that takes connections and never answers: no retries, no chatter, one message."""
    cached = tmp_path / "hub" / "models--somebodys--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment["HF_HOME"] = str(tmp_path)
    environment["NO_PROXY"] = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hub:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", HUB_SCRIPT, "nobody/none", "somebodys/tiny"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        refusal, loaded = done.stdout.splitlines()
        assert refusal.startswith("there is no model 'nobody/none' here, and the Hugging Face hub")
        assert '"smollm2-135m" (the embedded default)' in refusal
        assert loaded == "loaded 2"
        assert "Retrying" not in done.stderr
        hub.settimeout(0.5)
        questions = []
        with contextlib.suppress(TimeoutError):
            while True:
                connection = hub.accept()[0]
                with connection:
                    questions.append(connection.recv(4096).split(b" HTTP")[0].decode())
    # huggingface_hub asks something of its own besides
    assert [question for question in questions if "resolve" in question] == [
        "HEAD /nobody/none/resolve/main/config.json",
        "HEAD /somebodys/tiny/resolve/main/config.json",
    ]


def test_a_hub_name_without_a_hub_names_the_remedies():
    with pytest.raises(ModelLoadError) as caught:
        load_model("nobody/no-such-model")
    message = str(caught.value)
    assert "there is no model 'nobody/no-such-model' here, and the Hugging Face hub" in message
    assert '"smollm2-135m" (the embedded default)' in message
    assert ".gguf file" in message


def test_wrong_paths_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"there is no file .*gone\.gguf"):
        load_model(tmp_path / "gone.gguf")
    with pytest.raises(ModelLoadError, match="neither a model folder nor a .gguf file that exists"):
        load_model(tmp_path / "gone")
    with pytest.raises(ModelLoadError, match=r"folder .* has no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"<html>not found</html>", "is not a GGUF file .*broken download"),
        (b"GGUF" + b"\x00" * 64, r"cannot read .*broken\.gguf: .*damaged or cut short"),
    ],
)
def test_a_corrupt_gguf_file_is_named(tmp_path, content, message):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "broken.gguf")


def test_a_folder_without_weights_or_tokenizer_is_named(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer that loads: .*wrap_model"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"cannot load the model in .*Check its config\.json"):
        load_model(folder)
