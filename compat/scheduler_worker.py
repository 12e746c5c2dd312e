# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The child process of `harness.py`: the real vLLM scheduler with vllm-ascend's KV-cache code, one case per line.

Problem: admission must be shown by the scheduler itself, not by our arithmetic, on machines with and without an NPU;
and vllm-ascend patches vLLM for the whole process.
Way: a process of its own that reads cases as JSON lines and answers with JSON lines. KV groups, managers, needs and
steps all come from vLLM and vllm-ascend. Where the specs come from depends on the route, which each answer names:
  npu_platform   torch_npu loads (a real NPU or the software NPU): the unmodified NPUPlatform, and each spec from the
                 model's own cache class (`get_kv_cache_spec`).
  stand_in       torch_npu does not load: vllm-ascend's KV-cache modules alone, with device detection standing in as
                 Atlas A3. Here the specs are ours: vllm-ascend's spec classes, filled by our table of its layers
                 with the block sizes read out of its source. The other route compares them with the model's own.
For a case with `plugin` the compressor state layers are filtered from these specs before the scheduler sees them, and
nothing else: the plugin itself is not yet wired into the scheduler and is not loaded here.
Not here: a model, weights, a worker, KV tensors. A finished step is reported to the scheduler with an invented token.
"""

from __future__ import annotations

import ast
import ctypes
import enum
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from afd_dsv4.compat import harness
from afd_dsv4.geometry import CompressorKind, ModelGeometry

ARCHITECTURE = "DeepseekV4ForCausalLM"


def torch_npu_loads() -> bool:
    """Whether the CANN libraries that torch_npu links can be found, without importing it."""
    try:
        ctypes.CDLL("libhccl.so")
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return importlib.util.find_spec("torch_npu") is not None


class Stack:
    """vLLM and vllm-ascend, imported and patched once."""

    def __init__(self) -> None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self.route = harness.Route.NPU_PLATFORM if torch_npu_loads() else harness.Route.STAND_IN
        # Only vllm-ascend's platform, or no plugin at all: neither our own nor a stranger's may take part.
        os.environ["VLLM_PLUGINS"] = "ascend" if self.route is harness.Route.NPU_PLATFORM else ""
        if self.route is harness.Route.NPU_PLATFORM:
            self._load_npu_platform()
        else:
            self._load_stand_in()
        # Imported by name throughout: a type checker need not read vLLM, and nothing is loaded before its turn.
        self.kv_cache_utils = import_module("vllm.v1.core.kv_cache_utils")
        self.ascend_specs = import_module("vllm_ascend.core.kv_cache_interface")
        patched = self.kv_cache_utils.group_and_unify_kv_cache_specs.__module__
        if not patched.startswith("vllm_ascend."):
            raise RuntimeError(f"vllm-ascend's KV grouping is not in place, found {patched}")
        self._register_model()
        self._folder = tempfile.TemporaryDirectory(prefix="afd_dsv4_")
        self._folders: dict[ModelGeometry, str] = {}

    def _load_npu_platform(self) -> None:
        import_module("torch_npu")
        import_module(
            "vllm.platforms"
        ).current_platform.pre_register_and_update()  # what EngineArgs does: applies vllm-ascend's global patches
        self.block_sizes = dict(import_module("vllm_ascend.models.layer.attention.layer").DSV4_BLOCK_SIZES)

    def _load_stand_in(self) -> None:
        # None makes an import fail cleanly. torchvision is optional to transformers, and a build that does not match
        # the installed torch would break the import of vLLM's configuration.
        for absent in ("torch_npu", "torchvision"):
            sys.modules[absent] = None  # type: ignore[assignment]
        found = importlib.util.find_spec("vllm_ascend")
        if found is None or not found.submodule_search_locations:
            raise RuntimeError("vllm_ascend is not installed; install vllm-ascend 0.23.0")
        root = Path(next(iter(found.submodule_search_locations)))
        for name in ("vllm_ascend", "vllm_ascend.core", "vllm_ascend.patch", "vllm_ascend.patch.platform"):
            package = types.ModuleType(name)  # the packages' own __init__ files want torch_npu
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        device = enum.Enum("AscendDeviceType", ["A2", "A3", "_310P", "A5"])  # type: ignore[misc]
        utils = types.ModuleType("vllm_ascend.utils")
        utils.__dict__.update(
            AscendDeviceType=device,
            get_ascend_device_type=lambda: device.A3,
            vllm_version_is=lambda version: version == import_module("vllm").__version__,
            is_310p=lambda: False,
        )
        sys.modules["vllm_ascend.utils"] = utils
        for module in ("patch_kv_cache_utils", "patch_kv_cache_coordinator", "patch_async_swa_kv_lifetime"):
            import_module(f"vllm_ascend.patch.platform.{module}")
        import_module("vllm_ascend.core.kv_cache_interface").register_ascend_kv_cache_specs()
        self.block_sizes = _block_sizes_in_source(root / "models" / "layer" / "attention" / "layer.py")

    def _register_model(self) -> None:
        nn = import_module("torch.nn")

        class Model(nn.Module):  # type: ignore[name-defined,misc]
            """Only inspected, never built: a class object saves vLLM's model-inspection subprocess."""

            def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002  what vLLM looks for
                super().__init__()

            def embed_input_ids(self, input_ids: Any) -> None: ...

            def forward(self, input_ids: Any, positions: Any) -> None: ...

            def compute_logits(self, hidden_states: Any) -> None: ...

        import_module("vllm.model_executor.models").ModelRegistry.register_model(ARCHITECTURE, Model)

    def config(self, case: harness.Case) -> Any:
        """A VllmConfig as the server would make it, without weights, tokenizer or network."""
        vllm = import_module("vllm.config")
        model = vllm.ModelConfig(
            model=self._model_folder(case.geometry),
            skip_tokenizer_init=True,
            max_model_len=case.max_model_len,
            dtype="bfloat16",
            seed=0,
            enforce_eager=True,
        )
        scheduler = vllm.SchedulerConfig(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_model_len=case.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=case.async_scheduling,
            scheduler_reserve_full_isl=case.reserve_full_isl,
        )
        config = vllm.VllmConfig(
            model_config=model,
            cache_config=vllm.CacheConfig(block_size=case.block_size, enable_prefix_caching=False),
            scheduler_config=scheduler,
            parallel_config=vllm.ParallelConfig(),
            **({} if self.route is harness.Route.NPU_PLATFORM else {"device_config": vllm.DeviceConfig("cpu")}),
        )
        if self.route is harness.Route.STAND_IN:
            # What NPUPlatform answers and the unspecified platform does not: it supports groups of several kinds.
            config.scheduler_config.disable_hybrid_kv_cache_manager = False
        wanted = (case.block_size, case.async_scheduling, False, False)
        got = (
            config.cache_config.block_size,
            bool(config.scheduler_config.async_scheduling),
            config.cache_config.enable_prefix_caching,
            config.scheduler_config.disable_hybrid_kv_cache_manager,
        )
        if got != wanted:
            raise RuntimeError(f"vLLM changed the settings of the case: wanted {wanted}, got {got}")
        return config

    def _model_folder(self, geometry: ModelGeometry) -> str:
        if geometry not in self._folders:
            folder = Path(self._folder.name) / str(len(self._folders))
            folder.mkdir()
            config = json.dumps(_hf_config(geometry))
            (folder / "config.json").write_text(config, encoding="utf-8")
            self._folders[geometry] = str(folder)
        return self._folders[geometry]

    def specs(self, case: harness.Case, config: Any) -> dict[str, Any]:
        """KV-cache specs by layer name, in the order in which the model makes its layers."""
        specs = _specs_from_table(case.geometry, config, self.block_sizes, self.ascend_specs)
        if self.route is harness.Route.STAND_IN:
            return specs
        asked = _specs_of_model_classes(case.geometry, config)
        if asked != specs:  # so the other route is known to be right as well
            name = next(iter(name for name in {**asked, **specs} if asked.get(name) != specs.get(name)))
            raise RuntimeError(f"{name}: the model's class says {asked.get(name)}, our table {specs.get(name)}")
        return asked


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer each case; the first line says that the stack is loaded."""
    stack = Stack()
    table = {str(size): entry for size, entry in stack.block_sizes.items()}
    print(json.dumps({"ready": stack.route.value, "block_sizes": table}), file=answers, flush=True)
    for line in commands:
        try:
            answer = asdict(run(stack, harness.Case.from_json(json.loads(line))))
        except Exception as error:  # the caller decides what it means; the process stays usable
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def run(stack: Stack, case: harness.Case) -> harness.Outcome:
    """Drive one case through the real scheduler."""
    utils = stack.kv_cache_utils
    config = stack.config(case)
    import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(config)
    specs = stack.specs(case, config)
    if case.plugin:  # what the plugin will do to the model, done here by hand: no KV-cache spec for its state layers
        specs = {name: spec for name, spec in specs.items() if not name.endswith(".state_cache")}
    groups = utils.get_kv_cache_groups(config, specs)
    block_bytes = _block_bytes(utils, config, groups)
    pool_bytes = case.kv_bytes if case.kv_bytes is not None else (int(case.free_blocks or 0) + 1) * block_bytes
    cache = utils.generate_scheduler_kv_cache_config(
        [utils.get_kv_cache_config_from_groups(config, groups, pool_bytes)]
    )
    config.cache_config.num_gpu_blocks = cache.num_blocks
    block_size, hash_block_size = utils.resolve_kv_cache_block_sizes(cache, config)[:2]
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=import_module("vllm.v1.structured_output").StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    names = [_kind(group) for group in groups]
    whole = [_needs(names, managers, tokens, capped=True) for tokens in case.prompts]
    chunks = [
        _needs(names, managers, min(tokens, case.max_num_batched_tokens), capped=False) for tokens in case.prompts
    ]
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for index, tokens in enumerate(case.prompts):
        scheduler.add_request(_request(f"r{index}", tokens))
    return harness.Outcome(
        route=stack.route.value,
        scheduler=type(scheduler).__name__,
        num_blocks=cache.num_blocks,
        block_bytes=block_bytes,
        free_blocks=free,
        max_in_flight_tokens=config.max_concurrent_batches * case.max_num_batched_tokens,
        startup_blocks=-(-utils._max_memory_usage_bytes_from_groups(config, groups) // block_bytes),
        groups=tuple(
            harness.Group(
                name=name,
                layers=len(group.layer_names),
                block_rows=manager.block_size,
                spec=type(next(iter(group.kv_cache_spec.kv_cache_specs.values()))).__name__,
                manager=type(manager).__name__,
            )
            for name, group, manager in zip(names, groups, managers, strict=True)
        ),
        whole_prompt=tuple(whole),
        first_chunk=tuple(chunks),
        steps=tuple(_steps(scheduler, case.steps, ahead=int(case.async_scheduling))),
    )


def _steps(scheduler: Any, count: int, ahead: int) -> Iterator[harness.Step]:
    """As the engine calls it, which schedules `ahead` steps before it reads the output of one."""
    unread: list[tuple[Any, list[bool]]] = []
    for _ in range(count):
        output = scheduler.schedule()
        stats = scheduler.make_stats()
        yield harness.Step(
            scheduled=dict(output.num_scheduled_tokens),
            running=stats.num_running_reqs,
            waiting_for_capacity=stats.num_waiting_reqs,
            kv_usage=stats.kv_cache_usage,
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )
        if output.num_scheduled_tokens:
            asked = [scheduler.requests[name] for name in output.num_scheduled_tokens]
            unread.append((output, [one.num_computed_tokens >= one.num_prompt_tokens for one in asked]))
        if len(unread) > ahead or (unread and not output.num_scheduled_tokens):
            _finish(scheduler, *unread.pop(0))


def _finish(scheduler: Any, output: Any, complete: list[bool]) -> None:
    """Tell the scheduler that the step ran: one sampled token for each request whose prompt was complete with it."""
    ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(
        output,
        import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[7] if done else [] for done in complete],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )


def _needs(names: list[str], managers: Any, tokens: int, *, capped: bool) -> dict[str, int]:
    """Ask every manager what `allocate_slots` asks for a request that holds nothing yet."""
    total: dict[str, int] = {}
    for name, manager in zip(names, managers, strict=True):
        ask = manager.get_num_blocks_to_allocate
        # The second one since vLLM 0.26.0.
        computed = {"total_computed_tokens", "num_local_computed_tokens"} & inspect.signature(ask).parameters.keys()
        blocks = ask(
            request_id="not-in-the-queue",
            num_tokens=tokens,
            new_computed_blocks=[],
            num_tokens_main_model=tokens,
            apply_admission_cap=capped,
            **dict.fromkeys(computed, 0),
        )
        total[name] = total.get(name, 0) + blocks
    return total


def _request(name: str, tokens: int) -> Any:
    return import_module("vllm.v1.request").Request(
        request_id=name,
        prompt_token_ids=[1] * tokens,
        sampling_params=import_module("vllm.sampling_params").SamplingParams(max_tokens=8),
        pooling_params=None,
    )


def _block_bytes(utils: Any, config: Any, groups: Any) -> int:
    """Bytes behind one block id, from the tensors that the real planner lays out for 1,000 and more blocks."""
    plan = utils.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    size, rest = divmod(sum(tensor.size for tensor in plan.kv_cache_tensors), plan.num_blocks)
    if rest:
        raise RuntimeError(f"{plan.num_blocks} blocks do not share {size} bytes evenly")
    return int(size)


def _kind(group: Any) -> str:
    """Our name of a KV group, from its layers."""
    spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
    if group.layer_names[0].endswith(".swa_cache"):
        return "swa"
    ratio = {8: 4, 128: 128}[spec.sliding_window] if hasattr(spec, "sliding_window") and spec.sliding_window else None
    if group.layer_names[0].endswith(".state_cache"):
        return f"c{ratio}_state"
    return f"c{spec.compress_ratio}_mla"


def _caches(geometry: ModelGeometry) -> Iterator[tuple[str, str, CompressorKind | None]]:
    """Role, layer name and compressor of every cache, in the order in which the model makes them."""
    for index, ratio in enumerate(geometry.compress_ratios):
        prefix = f"model.layers.{index}.attn"
        kind = {4: CompressorKind.C4, 128: CompressorKind.C128}.get(ratio)
        if kind is not None:
            yield "state", f"{prefix}.compressor.state_cache", kind
        if kind is CompressorKind.C4:
            yield "indexer", f"{prefix}.indexer.k_cache", CompressorKind.C4_INDEXER
            yield "state", f"{prefix}.indexer.compressor.state_cache", CompressorKind.C4_INDEXER
        yield "window", f"{prefix}.swa_cache", None
        if kind is not None:
            yield "attention", prefix, kind


def _state_dim(geometry: ModelGeometry, kind: CompressorKind) -> int:
    head_dim = geometry.index_head_dim if kind is CompressorKind.C4_INDEXER else geometry.head_dim
    return 2 * kind.coff * head_dim


def _specs_of_model_classes(geometry: ModelGeometry, config: Any) -> dict[str, Any]:
    """Ask vllm-ascend's own cache classes, with the arguments that its model gives them."""
    torch = import_module("torch")
    model = import_module("vllm_ascend.models.deepseek_v4")
    layer = import_module("vllm_ascend.models.layer.attention.layer")
    cache = config.cache_config
    rows = layer.DSV4_BLOCK_SIZES[cache.block_size][0]

    def module(role: str, name: str, kind: CompressorKind | None) -> Any:
        if role == "state":
            assert kind is not None
            return model.AscendCompressorStateCache(
                state_dim=_state_dim(geometry, kind),
                dtype=torch.float32,
                compress_ratio=kind.ratio,
                block_size=rows[2] if kind.ratio == 4 else rows[3],
                prefix=name,
            )
        if role == "indexer":
            return model.AscendDeepseekV4IndexerCache(
                head_dim=geometry.index_head_dim, dtype=torch.int8, prefix=name, cache_config=cache, compress_ratio=4
            )
        if role == "window":
            return model.AscendDeepseekV4SWACache(
                head_dim=geometry.head_dim,
                window_size=geometry.sliding_window,
                dtype=torch.bfloat16,
                prefix=name,
                cache_config=cache,
            )
        assert kind is not None
        # The attention layer without its weights: its method reads these three attributes.
        attention = layer.DSAAttention.__new__(layer.DSAAttention)
        torch.nn.Module.__init__(attention)
        attention.compress_ratio = kind.ratio
        attention.kv_cache_dtype = "auto"
        attention.head_size = geometry.head_dim
        return attention

    with import_module("vllm.config").set_current_vllm_config(config):
        specs = {name: module(role, name, kind).get_kv_cache_spec(config) for role, name, kind in _caches(geometry)}
    config.compilation_config.static_forward_context.clear()
    return specs


def _specs_from_table(geometry: ModelGeometry, config: Any, table: dict[int, Any], specs_module: Any) -> dict[str, Any]:
    """The same specs, from the numbers in vllm-ascend's source. The other route compares them with its own."""
    torch = import_module("torch")
    (kv_rows, swa_rows, c4_rows, c128_rows), (indexer_page, other_page) = table[config.cache_config.block_size]
    deepseek = {"model_version": "deepseek_v4", "cache_dtype_str": config.cache_config.cache_dtype, "num_kv_heads": 1}

    def spec(role: str, kind: CompressorKind | None) -> Any:
        if role == "window":
            return specs_module.AscendSlidingWindowMLASpec(
                block_size=swa_rows,
                head_size=geometry.head_dim,
                dtype=torch.bfloat16,
                sliding_window=geometry.sliding_window,
                alignment=None,
                **deepseek,
            )
        assert kind is not None
        if role == "state":
            dim = _state_dim(geometry, kind)
            return specs_module.AscendSlidingWindowMLASpec(
                block_size=c4_rows if kind.ratio == 4 else c128_rows,
                num_kv_heads=1,
                head_size=dim,
                dtype=torch.float32,
                sliding_window=kind.coff * kind.ratio,
                alignment=None,
                page_size_padded=indexer_page if dim == 512 and kind.ratio == 4 else other_page,
            )
        head, dtype, more = geometry.head_dim, torch.bfloat16, {}
        if role == "indexer":
            head, dtype, more = geometry.index_head_dim, torch.int8, {"scale_dim": 1, "scale_dtype": torch.float16}
        return specs_module.AscendMLAAttentionSpec(
            block_size=kv_rows, head_size=head, dtype=dtype, compress_ratio=kind.ratio, **deepseek, **more
        )

    return {name: spec(role, kind) for role, name, kind in _caches(geometry)}


def _block_sizes_in_source(path: Path) -> dict[int, Any]:
    """The literal `_DSV4_BLOCK_SIZES` of vllm-ascend, read without importing the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_DSV4_BLOCK_SIZES":
            return dict(ast.literal_eval(node.value))
    raise RuntimeError(f"no _DSV4_BLOCK_SIZES in {path}")


def _hf_config(geometry: ModelGeometry) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "hidden_size": geometry.hidden_size,
        "num_hidden_layers": geometry.num_layers,
        "num_nextn_predict_layers": geometry.num_nextn_layers,
        "compress_ratios": [*geometry.compress_ratios, *[0] * geometry.num_nextn_layers],
        "head_dim": geometry.head_dim,
        "index_head_dim": geometry.index_head_dim,
        "qk_rope_head_dim": geometry.qk_rope_head_dim,
        "sliding_window": geometry.sliding_window,
        "max_position_embeddings": geometry.max_position_embeddings,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
    }


if __name__ == "__main__":
    # Libraries print to stdout; the answers need it for themselves.
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, private)
