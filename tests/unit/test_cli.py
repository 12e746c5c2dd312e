# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The command line: the documented JSON, one-line errors with status 2, and a fast start."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.cli import main
from afd_dsv4.geometry import DEFAULT_STACK, page_layout, preset
from afd_dsv4.softnpu.launcher import LIBRARIES
from afd_dsv4.workspace.sizing import size_workspace

PUBLISHED = {
    "--model": "flash",
    "--prompt-tokens": "63778",
    "--max-num-batched-tokens": "65536",
    "--block-size": "128",
    "--free-blocks": "6958",
}


def arguments(**changes):
    options = {**PUBLISHED, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    return ["plan", *(part for name, value in options.items() if value is not None for part in (name, value))]


def plan_json(capsys, **changes):
    assert main([*arguments(**changes), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_published_request_answers_as_documented(capsys):
    answer = plan_json(capsys)
    native, plugin = answer["native"], answer["plugin"]
    assert native["blocks_needed"] == 11094
    assert native["by_group"] == {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994}
    assert native["admitted"] is False
    assert "11,094" in native["reason"]
    assert plugin["blocks_needed"] == 1127
    assert sum(plugin["by_group"].values()) == 1127
    assert plugin["admitted"] is True
    assert native["free_blocks"] == plugin["free_blocks"] == 6958


def test_plan_reports_the_sizes_of_the_sizing_function_for_the_given_options(capsys):
    plugin = plan_json(capsys, max_num_seqs="128")["plugin"]
    sizes = size_workspace(
        preset("flash"), page_layout(DEFAULT_STACK, 128), max_num_seqs=128, max_num_batched_tokens=65536, slots=2
    )
    assert plugin["tail_bytes_per_request"] == sizes.tail_bytes_per_request
    assert plugin["slot_bytes"] == sizes.slot_bytes
    assert plugin["reserved_bytes"] == sizes.device_bytes


def test_plan_counts_the_staging_rows_of_the_afd_executor_in_its_slots(capsys):
    stock = plan_json(capsys)["plugin"]
    ours = plan_json(capsys, executor="afd")["plugin"]
    rows = (2048 + 4) * 10240 + 2 * 8192  # of both C4 compressors, and what their kernels leave in front of them
    assert (stock["executor"], ours["executor"]) == ("stock", "afd")
    assert ours["slot_bytes"] - stock["slot_bytes"] == rows
    assert ours["reserved_bytes"] - stock["reserved_bytes"] == 2 * rows
    whole = plan_json(capsys, executor="afd", tile_tokens="65536")["plugin"]
    assert whole["slot_bytes"] - stock["slot_bytes"] == 65536 * 10240 + 2 * 8192
    assert main(arguments(tile_tokens="127")) == 2
    assert "127 is not between 128" in capsys.readouterr().err


@pytest.mark.parametrize("max_num_seqs", ["16", "128"])
def test_with_an_hbm_budget_the_plugin_pays_for_what_it_reserves_and_still_starts(capsys, max_num_seqs):
    gib = 6959 * 3249664 / 2**30
    answer = plan_json(capsys, free_blocks=None, hbm_gib=repr(gib), max_num_seqs=max_num_seqs)
    assert answer["native"]["free_blocks"] == 6958
    left = 6959 * 3249664 - answer["plugin"]["reserved_bytes"]
    assert answer["plugin"]["free_blocks"] == left // 3249664 - 1
    assert answer["plugin"]["admitted"] is True
    assert answer["native"]["admitted"] is False


def test_without_a_memory_size_only_the_need_is_given(capsys):
    answer = plan_json(capsys, free_blocks=None)
    assert answer["native"]["blocks_needed"] == 11094
    assert answer["native"]["admitted"] is None


@pytest.mark.parametrize(
    ("option", "needed", "words"),
    [
        ([], 11094, "asynchronous scheduling (2 batches in flight, as vLLM does by default)"),
        (["--async-scheduling"], 11094, "asynchronous scheduling (2 batches in flight, as vLLM does by default)"),
        (["--no-async-scheduling"], 5772, "no asynchronous scheduling (1 batch in flight)"),
    ],
)
def test_asynchronous_scheduling_is_the_default_and_an_answer_says_which_it_was(capsys, option, needed, words):
    chunks = [*arguments(max_num_batched_tokens="32768"), *option]
    assert main([*chunks, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["async_scheduling"] is (needed == 11094)
    assert answer["max_in_flight_tokens"] == 32768 * (2 if answer["async_scheduling"] else 1)
    assert answer["native"]["blocks_needed"] == needed  # the long way: tests/unit/test_admission.py
    assert main(chunks) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f", longest sequence 1,048,576, {words}")


def test_plan_and_doctor_take_the_same_scheduling_for_granted(capsys):
    main(["doctor", *arguments()[1:]])
    assert "asynchronous scheduling on" in capsys.readouterr().out
    assert plan_json(capsys)["async_scheduling"] is True


@pytest.mark.parametrize(("option", "largest"), [("--async-scheduling", 19832), ("--no-async-scheduling", 39665)])
def test_a_batch_that_is_said_to_start_the_prompt_starts_it_and_one_token_more_does_not(capsys, option, largest):
    def asked(batch):  # spelled out in docs/arithmetic.md; 1 or 2 batches in flight
        alive = (1 + (option == "--async-scheduling")) * batch
        groups = ((2, 128, 128), (1, 8, 8), (1, 128, 32))
        return 125 + 4 + sum(n * min(-(-63778 // r), -(-(w - 1 + alive) // r) + 1) for n, w, r in groups)

    assert asked(largest) <= 6958 < asked(largest + 1)
    assert main([*arguments(), option]) == 0
    assert f"or max-num-batched-tokens {largest:,} or less" in capsys.readouterr().out


def test_the_readme_says_what_plan_prints(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = " ".join(readme.partition("## Will my prompt start?")[2].partition("\n## ")[0].split())
    published, small = re.findall(r"afd-dsv4 (plan [^,]*?(?:--free-blocks \d+|--hbm-gib [\d.]+))", section)

    def printed(pattern, *words):
        assert main([word for part in words for word in part.split()]) == 0
        return re.search(pattern, capsys.readouterr().out).groups()

    (limit,), (synchronous,) = (
        printed(r"max-num-batched-tokens ([\d,]+) or less", published, *more)
        for more in ([], ["--no-async-scheduling"])
    )
    assert f"a batch of at most {limit} tokens" in section
    assert f"without it the batch limit above is {synchronous}." in section
    free = r"whole prompt +(\S+) +(\S+)\n.*\n +free +(\S+) +(\S+)\n(?s:.*)reserves (\S+ MiB)"
    needs, plugin_needs, has, plugin_has, reserved = printed(free, small)
    said = f"Natively it needs {needs} blocks of {has}, with the plugin {plugin_needs} of {plugin_has}"
    assert f"{said}, beside {reserved} for tails and slots." in section
    assert f"are the {has} free blocks of vllm-ascend#9543" in section
    given = "--hbm-gib 21.0618 --max-num-seqs 128"
    _, plugin_needs, has, plugin_has, _ = printed(free, published.partition("--free-blocks")[0], given)
    assert f"{plugin_needs} of {plugin_has} is `{given}`, in which natively {has} are free" in section


def test_lists_whose_values_are_often_small_may_have_three_digits_behind_a_comma(capsys):
    lists = {"max_num_seqs": "16,128,256", "prompt_tokens": "8192,32768,131072", "block_size": "64,128"}
    answers = plan_json(capsys, **lists)["answers"]
    assert {answer["max_num_seqs"] for answer in answers} == {16, 128, 256}
    assert {answer["prompt_tokens"] for answer in answers} == {8192, 32768, 131072}
    assert len(answers) == 3 * 3 * 2
    small = plan_json(capsys, prompt_tokens="63, 778", free_blocks="0,778")["answers"]
    assert {answer["prompt_tokens"] for answer in small} == {63, 778}
    assert {answer["free_blocks"] for answer in small} == {0, 778}


def test_memory_in_gib_says_of_what_it_is(capsys):
    words = "GiB a rank for the KV cache and all that the plugin reserves, not the card's size"
    assert main(arguments(free_blocks=None, hbm_gib="15.17")) == 0
    assert f"; 15.17 {words}" in capsys.readouterr().out.splitlines()[0]
    for gib in ("15.17,24", "24"):
        assert main(arguments(free_blocks=None, hbm_gib=gib, prompt_tokens="8192,32768")) == 0
        assert capsys.readouterr().out.splitlines()[1] == f"memory: {words}"
    assert main(arguments(prompt_tokens="8192,32768")) == 0
    assert words not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro", "DeepSeek-V4-Flash-w8a8"]
)
def test_a_hugging_face_name_is_planned_like_the_preset_that_it_names(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert plan_json(capsys, model=name) == plan_json(capsys, model="pro" if "Pro" in name else "flash")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{")  # a file of that name is what was meant
    assert main(arguments(model=name)) == 2
    assert f"{name} is not JSON" in capsys.readouterr().err


def test_the_text_answer_shows_both_sides_and_the_reason(capsys):
    assert main(arguments()) == 0
    text = capsys.readouterr().out
    for piece in ("c4_state", "7,973", "11,094", "1,127", "native: waits", "21 c4", "20 c128"):
        assert piece in text


FLASH_CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [*preset("flash").compress_ratios, 0],
    "head_dim": 512,
    "index_head_dim": 128,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
}


def test_a_config_file_is_planned_like_its_preset(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH_CONFIG))
    from_file, from_preset = plan_json(capsys, model=str(path)), plan_json(capsys)
    assert from_file.pop("model") == "config.json"
    assert from_preset.pop("model") == "flash"
    assert from_file == from_preset


FILES = {
    "not_json.json": "{",
    "a_list.json": "[1]",
    "a_number.json": "7",
    "empty.json": "",
    "wrong_ratio.json": json.dumps({"num_hidden_layers": 1, "head_dim": 512, "compress_ratios": [3]}),
    "v41.json": json.dumps({"num_hidden_layers": 1, "head_dim": 512, "qk_rope_head_dim": 64, "compress_ratios": [2]}),
    "llama.json": json.dumps({"model_type": "llama"}),
    "deep.json": "[" * 100_000,
    "digits.json": json.dumps(FLASH_CONFIG).replace("1048576", "9" * 5000),
    "layers.json": json.dumps({**FLASH_CONFIG, "num_hidden_layers": 2_000_000}),
    "wide.json": json.dumps({**FLASH_CONFIG, "head_dim": 10**400}),
    "an_object.json": "{}",
    "another.json": json.dumps({"hidden_size": 4096, "n_layer": 12}),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "mini"}, "cannot read 'mini'"),
        ({"model": "a\0b"}, "cannot read"),
        *(({"model": name}, name) for name in ("not_json.json", "a_list.json", "a_number.json", "empty.json")),
        ({"model": ""}, "model: nothing was given; give flash, pro or the path of a config.json\n"),
        ({"model": "."}, "model: . is a directory; give the config.json in it\n"),
        ({"model": "fifo"}, "model: fifo is not a regular file; give flash, pro or the path of a config.json\n"),
        ({"model": os.devnull}, "is not a regular file"),
        ({"model": "deep.json"}, "is not JSON"),
        ({"model": "digits.json"}, "digits.json holds a number with thousands of digits; correct it\n"),
        ({"model": "layers.json"}, "num_hidden_layers: 2000000; it must be a whole number from 1 to 10000"),
        ({"model": "wide.json"}, "head_dim: a number of 1329 bits; it must be"),
        ({"model": "wrong_ratio.json"}, "wrong_ratio.json"),
        ({"model": "v41.json"}, "v41.json"),
        (
            {"model": "llama.json"},
            "llama.json: model_type: 'llama', so this is no DeepSeek-V4 config.json; only deepseek_v4",
        ),
        *(
            (
                {"model": name},
                f"{name}: model_type: missing, and compress_ratios too, so this is no DeepSeek-V4 config.json; give",
            )
            for name in ("an_object.json", "another.json")
        ),
        ({"model": "deepseek-ai/DeepSeek-V3"}, "cannot read 'deepseek-ai/DeepSeek-V3' (No such file"),
        ({"model": "deepseek-ai/DeepSeek-V4.1-Flash"}, "cannot read 'deepseek-ai/DeepSeek-V4.1-Flash' (No such file"),
        ({"model": "configs/deepseek-v4-flash.json"}, "cannot read 'configs/deepseek-v4-flash.json' (No such file"),
        ({"model": "/absent/DeepSeek-V4-Flash"}, "cannot read '/absent/DeepSeek-V4-Flash' (No such file"),
        (
            {"prompt_tokens": "63,778"},
            "--prompt-tokens: '63,778' may mean 63778, which is written without a comma, or 63",
        ),
        ({"prompt_tokens": "8192,32,768"}, "may mean 32768, which is written without a comma, or 32 and 768, which"),
        ({"max_num_batched_tokens": "65,536"}, "--max-num-batched-tokens: '65,536' may mean 65536"),
        ({"free_blocks": "6,958"}, "--free-blocks: '6,958' may mean 6958"),
        ({"free_blocks": "1,006,958"}, "'1,006,958' may mean 1006"),
        ({"max_num_seqs": "1,024"}, "--max-num-seqs: '1,024' has '024' behind a comma, which is for lists only"),
        ({"free_blocks": None, "hbm_gib": "21,0618"}, "--hbm-gib: '21,0618' has '0618' behind a comma"),
        ({"model": "latin.json"}, "is not a text file"),
        ({"block_size": "16"}, "choose one of 32, 64, 128"),
        ({"block_size": "one"}, "'one' is not a whole number"),
        ({"prompt_tokens": "1048577"}, "the longest sequence is 1048576"),
        ({"prompt_tokens": "0"}, "not between 1"),
        ({"prompt_tokens": "-3"}, "not between 1"),
        ({"prompt_tokens": "9" * 60}, "not between 1"),
        ({"max_num_batched_tokens": "0"}, "not between 1"),
        ({"max_num_seqs": "0"}, "not between 1"),
        ({"free_blocks": "-1"}, "not between 0"),
        ({"free_blocks": None, "hbm_gib": "0.001"}, "HBM budget"),
        (
            {"free_blocks": None, "hbm_gib": "0.005", "max_num_seqs": "128"},
            "hold no two KV blocks of 3,249,664 bytes; the first is never handed out; offer at least 0.01 GiB\n",
        ),
        ({"drafts": "-1"}, "--drafts: -1 is not between 0"),
        ({"free_blocks": None, "hbm_gib": "-1"}, "not between 0"),
        ({"free_blocks": None, "hbm_gib": "nan"}, "not between 0"),
        ({"free_blocks": None, "hbm_gib": "much"}, "is not a number"),
        ({"hbm_gib": "20"}, "not allowed with argument"),
        ({"max_model_len": "2000000"}, "max-model-len"),
        ({"stack": "vllm-ascend-1.0"}, "supported: vllm-ascend-0.23.0"),
        ({"model": None}, "--model"),
        ({"colour": "red"}, "unrecognized arguments: --colour red"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, changes, says):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.json").write_bytes(b"\xff{}")
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it: opening it would wait for ever
    assert main(arguments(**changes)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("afd-dsv4: error: ")
    assert output.err.count("\n") == 1
    assert says in output.err


@pytest.mark.parametrize("command", [[], ["plam"], ["evidence", "--device", "tpu"]])
def test_a_wrong_command_is_one_line_and_status_2(capsys, command):
    assert main(command) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "help_of"),
    [
        (["evidence", "--devise", "x"], "afd-dsv4 evidence"),
        (["trace", "check", "a", "b"], "afd-dsv4 trace check"),
        ([*arguments(), "--colour"], "afd-dsv4 plan"),
    ],
)
def test_an_option_that_a_command_does_not_have_leads_to_the_help_of_that_command(capsys, words, help_of):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"; see {help_of} --help\n")


@pytest.mark.parametrize("tokens", ["0", "1023", "131073", "many"])
def test_a_batch_of_the_evidence_run_has_1024_to_131072_tokens(capsys, tokens):
    assert main(["evidence", "--tokens", tokens]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("afd-dsv4: error: command line: argument --tokens: ")
    assert ("is not a whole number" if tokens == "many" else f"{tokens} is not between 1024 and 131072") in error
    assert "see afd-dsv4 evidence --help" in error


def test_the_evidence_run_starts_itself_again_with_the_arguments_it_was_given(tmp_path):
    for name in LIBRARIES:
        (tmp_path / name).touch()  # the launcher looks whether they are built; nothing is loaded before the new start
    arguments = ["evidence", "--tokens", "1024", "--device", "softnpu", "--out", str(tmp_path / "out")]
    script = (
        "import sys, afd_dsv4.cli as cli\n"
        "def end(event, found):\n"
        "    if event == 'os.exec':\n"
        "        sys.exit(repr(found[1][1:]))\n"
        "sys.addaudithook(end)\n"
        f"cli.main({arguments!r})\n"
    )
    base = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", script, "not", "these"],
        env={**base, "AFD_DSV4_SOFTNPU_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == repr(["-m", "afd_dsv4", *arguments])


def test_plan_runs_as_a_command_without_torch_and_vllm():
    script = (
        "import sys, afd_dsv4.cli as cli\n"
        f"status = cli.main({arguments()!r})\n"
        "heavy = {'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_command_has_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "afd_dsv4", *arguments(block_size="7")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def command(*options, **settings):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **settings}
    return subprocess.run([sys.executable, "-m", "afd_dsv4", *options], text=True, check=False, **settings)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "d\\xe9.json"), ("utf-8", "d\u00e9.json")])
def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path, encoding, shown):
    path = tmp_path / "d\u00e9.json"
    path.write_text(json.dumps(FLASH_CONFIG))
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    done = command(*arguments(model=str(path)), env=env, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{shown} on ")
    path.write_text("{")
    done = command(*arguments(model=str(path)), env=env, encoding=encoding)
    assert done.returncode == 2
    assert done.stderr.startswith("afd-dsv4: error: model: ")
    assert f"{shown} is not JSON" in done.stderr


OUTPUTS = [arguments(), [*arguments(), "--json"], ["--help"], ["plan", "--help"], ["--version"]]


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_ends_the_command_silently_with_the_status_of_sigpipe(options, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(*options, stdout=writer, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


FULL = Path("/dev/full")
needs_dev_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@needs_dev_full
@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_without_room_is_one_line_and_status_2(options, unbuffered):
    with FULL.open("w") as full:
        done = command(*options, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 2
    assert done.stderr.startswith("afd-dsv4: error: standard output: cannot be written (No space left")
    assert done.stderr.count("\n") == 1


@needs_dev_full
def test_an_error_that_cannot_be_told_still_gives_status_2():
    with FULL.open("w") as full:
        done = command(*arguments(block_size="7"), stderr=full)
    assert (done.returncode, done.stdout) == (2, "")


def closed(descriptor, *options):
    line = f'exec "$0" -m afd_dsv4 "$@" {descriptor}>&-'
    return subprocess.run(["sh", "-c", line, sys.executable, *options], capture_output=True, text=True, check=False)


def test_a_closed_output_is_an_error_and_a_closed_error_output_does_not_turn_into_an_answer():
    done = closed(1, *arguments())
    assert done.returncode == 2
    assert done.stderr == "afd-dsv4: error: standard output: is closed; leave it open, the answer goes there\n"
    done = closed(2, *arguments(block_size="7"))
    assert (done.returncode, done.stdout) == (2, "")


def test_an_error_repeats_what_was_typed_only_as_far_as_it_can_be_read(capsys):
    assert main(["plan", "--model", "flash", "--prompt-tokens", "9" * 5000]) == 2
    said = capsys.readouterr().err
    assert f"'{79 * '9'}...{19 * '9'}' is not a whole number" in said
