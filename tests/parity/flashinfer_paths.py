"""FlashInfer's cuDNN paths, each called once with a fixed seed: one process's part of `tests.parity.flashinfer`.

    python -m tests.parity.flashinfer_paths [CACHE_DIRECTORY]

Prints a line of JSON for each path as it is done: `path {...}`; before them `versions {...}`, after them `stats {...}`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import cudnn
import flashinfer
import torch
from flashinfer.cudnn import decode, prefill
from flashinfer.gemm import gemm_base
from flashinfer.grouped_mm import grouped_mm_bf16, grouped_mm_fp8

import plancache
from plancache.cudnn import frontend

BF16, FP8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
GPU = torch.device("cuda", 0)


Tensors = dict[str, torch.Tensor]


@dataclass
class Path:
    """A call that gives outputs by name, and what torch gives in 32 bits: by name, or one tensor for all of them."""

    call: Callable[[], Tensors]
    reference: Callable[[], Tensors | torch.Tensor] = dict
    tolerance: float = 0.05


def values(*shape: int, seed: int, dtype: torch.dtype = BF16, factor: float = 1.0) -> torch.Tensor:
    """Numbers that are the same in every process."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * factor
    return made.to(dtype).to(GPU)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32, device=GPU)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = -1, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence, in 32 bits, with the mask aligned bottom right; q, k, v are (tokens, heads, size).

    Gives the output and the logarithm to base 2 of the sum of each row.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (one.float().repeat_interleave(groups, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    rows = torch.arange(q.shape[0], device=GPU)[:, None] + k.shape[0] - q.shape[0]
    columns = torch.arange(k.shape[0], device=GPU)[None]
    hidden = (columns > rows) if causal else torch.zeros_like(columns > rows)
    if window >= 0:
        hidden |= columns < rows - window
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), (scores.logsumexp(-1) * math.log2(math.e)).T


class Paths:
    """The paths by name: each is a function that makes its inputs and gives a `Path`."""

    def __init__(self) -> None:
        self.workspace = torch.zeros(128 * 1024 * 1024, dtype=torch.int8, device=GPU)
        self.all: dict[str, Callable[[], Path]] = {
            "prefill, ragged, LSE": lambda: self.ragged((100, 37, 512), 8, 2, lse=True),
            "prefill, ragged, other lengths": lambda: self.ragged((64, 300), 8, 2, lse=True),
            "prefill, ragged, d 192/128": lambda: self.ragged((100, 37, 512), 8, 8, d_qk=192),
            "prefill, ragged, window": lambda: self.ragged((300, 700), 8, 8, window=64),
            "prefill, ragged, fp8": lambda: self.ragged((128, 256), 8, 8, dtype=FP8),
            "prefill, paged": lambda: self.paged((5, 40), (100, 333)),
            "decode, paged": self.decode,
            "decode, paged, LSE": lambda: self.decode(lse=True),
            "decode, 2 tokens each": lambda: self.decode(tokens=2),
            "decode, captured": lambda: self.decode(captured=True, batch=3),
            "mm_bf16": self.mm_bf16,
            "mm_bf16, bias": lambda: self.mm_bf16(bias=True),
            "bmm_bf16": self.bmm_bf16,
            "bmm_fp8": self.bmm_fp8,
            "mm_fp8": self.mm_fp8,
            "grouped_mm_bf16": self.grouped_bf16,
            "grouped_mm_fp8": self.grouped_fp8,
            "mm_bf16, every tactic": self.every_tactic,
            "mm_bf16, a tuned tactic": self.tuned_tactic,
            "mm_mxfp8": lambda: self.block_scaled("mm_mxfp8"),
            "mm_fp4": lambda: self.block_scaled("mm_fp4"),
        }

    def ragged(
        self,
        lengths: tuple[int, ...],
        heads: int,
        kv_heads: int,
        d_qk: int = 128,
        lse: bool = False,
        window: int = -1,
        dtype: torch.dtype = BF16,
    ) -> Path:
        total, scale = sum(lengths), d_qk**-0.5
        q = values(total, heads, d_qk, seed=1, dtype=dtype)
        k = values(total, kv_heads, d_qk, seed=2, dtype=dtype)
        v = values(total, kv_heads, 128, seed=3, dtype=dtype)
        starts = int32(0, *(sum(lengths[: n + 1]) for n in range(len(lengths))))
        more: dict[str, Any] = {"o_data_type": BF16} if dtype is FP8 else {}
        if window >= 0:
            more["window_left"] = window

        def call() -> Tensors:
            out, sums = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
                q,
                k,
                v,
                scale,
                self.workspace,
                max_token_per_sequence=max(lengths),
                max_sequence_kv=max(lengths),
                causal=True,
                return_lse=lse,
                batch_offsets_q=starts,
                batch_offsets_k=starts,
                batch_offsets_units="tokens",
                **more,
            )
            return {"out": out, **({"lse": sums} if lse else {})}

        def reference() -> Tensors:
            parts = [one.split(list(lengths)) for one in (q, k, v)]
            outs, sums = zip(*(attention(*part, scale, window) for part in zip(*parts, strict=True)), strict=True)
            return {"out": torch.cat(outs), "lse": torch.cat(sums)}

        return Path(call, reference, 0.3 if dtype is FP8 else 0.05)

    def pages(self, lengths: tuple[int, ...], kv_heads: int = 2, size: int = 16) -> tuple[Any, ...]:
        """A paged KV cache, its table with the pages in a mixed order, and each sequence's K and V."""
        each = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(each), generator=torch.Generator().manual_seed(4)).tolist()
        k, v = (values(sum(each), kv_heads, size, 128, seed=seed) for seed in (5, 6))
        table = torch.zeros(len(lengths), max(each), dtype=INT32)
        for row, count in enumerate(each):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=INT32)
        sequences = []
        for row, length in enumerate(lengths):
            ids = table[row, : each[row]].long().to(GPU)
            sequences.append([one[ids].transpose(1, 2).flatten(0, 1)[:length] for one in (k, v)])
        return k, v, table.to(GPU), sequences

    def paged(self, lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> Path:
        k, v, table, sequences = self.pages(kv_lengths)
        q, scale = values(sum(lengths), 8, 128, seed=7), 128**-0.5
        starts = int32(0, *(sum(lengths[: n + 1]) for n in range(len(lengths))))
        counts, kv_counts = (int32(*each).view(-1, 1, 1, 1) for each in (lengths, kv_lengths))

        def call() -> Tensors:
            out, sums = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
                q,
                k,
                v,
                scale,
                self.workspace,
                max_token_per_sequence=max(lengths),
                max_sequence_kv=max(kv_lengths),
                actual_seq_lens_q=counts,
                actual_seq_lens_kv=kv_counts,
                block_tables=table,
                causal=True,
                return_lse=True,
                batch_offsets_q=starts,
                batch_offsets_o=starts,
                batch_offsets_units="tokens",
            )
            return {"out": out, "lse": sums}

        def reference() -> Tensors:
            parts = zip(q.split(list(lengths)), sequences, strict=True)
            outs, sums = zip(*(attention(part, *kv, scale) for part, kv in parts), strict=True)
            return {"out": torch.cat(outs), "lse": torch.cat(sums)}

        return Path(call, reference)

    def decode(self, lse: bool = False, tokens: int = 1, captured: bool = False, batch: int = 4) -> Path:
        lengths = (77, 200, 16, 1023)[:batch]
        k, v, table, sequences = self.pages(lengths)
        q, scale = values(batch * tokens, 8, 128, seed=8), 128**-0.5
        out, kv_lengths = torch.zeros_like(q), int32(*lengths).view(-1, 1, 1, 1)

        def once() -> Any:
            return flashinfer.cudnn.cudnn_batch_decode_with_kv_cache(
                q,
                k,
                v,
                scale,
                self.workspace,
                max_sequence_kv=max(lengths),
                actual_seq_lens_kv=kv_lengths,
                block_tables=table,
                out=out,
                return_lse=lse,
                q_len_per_req=tokens,
                is_cuda_graph_compatible=captured,
            )

        def call() -> Tensors:
            got = once()
            if captured:
                replayed = torch.cuda.CUDAGraph()
                with torch.cuda.graph(replayed):
                    once()
                out.zero_()
                replayed.replay()
                torch.cuda.synchronize()
            return {"out": out.clone(), **({"lse": got[1]} if lse else {})}

        def reference() -> Tensors:
            parts = zip(q.split(tokens), sequences, strict=True)
            outs, sums = zip(*(attention(part, *kv, scale) for part, kv in parts), strict=True)
            return {"out": torch.cat(outs), "lse": torch.cat(sums)}

        return Path(call, reference)

    def mm_bf16(self, bias: bool = False) -> Path:
        a, b = values(96, 1024, seed=9), values(768, 1024, seed=10, factor=1 / 32).T
        row = values(768, seed=11) if bias else None

        def call() -> Tensors:
            return {"out": flashinfer.mm_bf16(a, b, bias=row, backend="cudnn")}

        return Path(call, lambda: {"out": a.float() @ b.float() + (row.float() if bias else 0)})

    def bmm_bf16(self) -> Path:
        a, b = values(4, 96, 512, seed=12), values(4, 256, 512, seed=13, factor=1 / 23).transpose(1, 2)
        return Path(lambda: {"out": flashinfer.bmm_bf16(a, b, backend="cudnn")}, lambda: {"out": a.float() @ b.float()})

    def bmm_fp8(self) -> Path:
        a = values(4, 96, 512, seed=14, dtype=FP8)
        b = values(4, 256, 512, seed=15, dtype=FP8).transpose(1, 2)
        scales = torch.tensor(0.5, device=GPU), torch.tensor(1 / 16, device=GPU)
        return Path(
            lambda: {"out": flashinfer.bmm_fp8(a, b, *scales, BF16, backend="cudnn")},
            lambda: {"out": a.float() @ b.float() * scales[0] * scales[1]},
        )

    def mm_fp8(self) -> Path:
        a, b = values(80, 512, seed=22, dtype=FP8), values(256, 512, seed=23, dtype=FP8)
        alpha = torch.tensor(1 / 32, device=GPU)
        return Path(
            lambda: {"out": flashinfer.mm_fp8(a, b, alpha, backend="cudnn")},
            lambda: {"out": a.float() @ b.float().T * alpha},
        )

    def grouped_bf16(self) -> Path:
        a, b, starts = values(192, 512, seed=16), values(3, 256, 512, seed=17, factor=1 / 23), int32(0, 64, 96, 192)
        return Path(lambda: {"out": grouped_mm_bf16(a, b, starts)}, grouped(a, b, (64, 32, 96)))

    def grouped_fp8(self) -> Path:
        a, b = values(192, 512, seed=18, dtype=FP8), values(3, 256, 512, seed=19, dtype=FP8, factor=1 / 23)
        starts = int32(0, 64, 96, 192)
        return Path(lambda: {"out": grouped_mm_fp8(a, b, starts)}, grouped(a, b, (64, 32, 96)))

    def gemm(self) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
        """The inputs that FlashInfer's runner of bf16 GEMMs takes, of which the fifth is the output."""
        a, b = values(64, 512, seed=20), values(256, 512, seed=21, factor=1 / 23).T
        return [a, b, None, False, torch.zeros(64, 256, dtype=BF16, device=GPU), self.workspace], a, b

    def every_tactic(self) -> Path:
        """As its autotuner goes: all plans of a graph are built, and each is run by its index."""
        runner, (inputs, a, b) = gemm_base._cudnn_gemm_bf16_runner(True, True), self.gemm()

        def call() -> Tensors:
            outputs = {}
            for engine, knobs in runner.get_valid_tactics(inputs, None):
                runner.forward(inputs, tactic=(engine, knobs))
                outputs[f"engine {engine}, knobs {dict(knobs)}"] = inputs[4].clone()
            return outputs

        return Path(call, lambda: a.float() @ b.float())

    def tuned_tactic(self) -> Path:
        """As a process goes that reads what another has tuned: only that engine with those knobs is built."""
        runner, (inputs, a, b) = gemm_base._cudnn_gemm_bf16_runner(True, True), self.gemm()
        tactic = runner.get_valid_tactics(inputs, None)[0]
        gemm_base.clear_cudnn_graph_cache()

        def call() -> Tensors:
            runner.forward(inputs, tactic=tactic)
            return {"out": inputs[4].clone()}

        return Path(call, lambda: a.float() @ b.float())

    def block_scaled(self, name: str) -> Path:
        """Formats of Blackwell: before SM 10.0 FlashInfer refuses them, whatever the numbers are."""
        rows = torch.zeros(128, 128, dtype=torch.uint8, device=GPU)
        a = rows if name == "mm_fp4" else rows.view(FP8)
        scales = torch.full((128, 16), 127, dtype=torch.uint8, device=GPU)

        def call() -> Tensors:
            return {"out": getattr(flashinfer, name)(a, a.T, scales, scales.T, backend="cudnn")}

        return Path(call)


def grouped(a: torch.Tensor, b: torch.Tensor, counts: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    parts = list(zip(a.split(list(counts)), b, strict=True))
    return lambda: torch.cat([rows.float() @ weight.float().T for rows, weight in parts])


# ---------------------------------------------------------------- one process


def executed(graphs: list[Any]) -> list[str]:
    """The plan of every graph that was executed, in the order of the first time."""
    names = []
    for graph in {id(one): one for one in graphs}.values():
        engine = graph.selected_engine
        names.append(engine.name if engine is not None else frontend.plan_list(graph).chosen.name)
    return names


def run(prepare: Callable[[], Path], graphs: list[Any], cache: Any) -> dict[str, Any]:
    """One path: its first call, measured, and a second one, which must give the same bits."""
    graphs.clear()
    before: Counter[Any] = Counter(cache.stats() if cache else {})
    took = None
    try:
        path = prepare()
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = path.call()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        hashes = {name: digest(tensor) for name, tensor in outputs.items()}
        repeats = hashes == {name: digest(tensor) for name, tensor in path.call().items()}
        told = {
            "hashes": hashes,
            "repeats": repeats,
            "differences": differences(outputs, path.reference()),
            "tolerance": path.tolerance,
            "plans": executed(graphs),
        }
    except Exception as error:
        told = {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}
    after = Counter(cache.stats() if cache else {})
    after.subtract(before)
    told["served"] = {f"{source}: {reason}": number for (source, reason), number in after.items() if number}
    return {**told, "seconds": took}


def differences(outputs: Tensors, reference: Tensors | torch.Tensor) -> dict[str, float]:
    expected = reference if isinstance(reference, dict) else dict.fromkeys(outputs, reference)
    common = outputs.keys() & expected.keys()
    return {name: float((outputs[name].float() - expected[name]).abs().max()) for name in sorted(common)}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def watch_executions(graphs: list[Any]) -> None:
    original = cudnn.pygraph.execute

    @functools.wraps(original)  # FlashInfer looks at its signature
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(self)
        return original(self, *args, **kwargs)

    cudnn.pygraph.execute = execute


def main() -> None:
    """All paths, from the cache in the directory named, if one is."""
    cache = plancache.enable(plancache.open(sys.argv[1])) if len(sys.argv) > 1 else None
    graphs: list[Any] = []
    watch_executions(graphs)
    torch.cuda.init()
    (torch.ones(64, 64, device=GPU, dtype=BF16) @ torch.ones(64, 64, device=GPU, dtype=BF16)).sum().item()
    prefill._create_cudnn_handle(device=GPU)
    decode._create_cudnn_handle(device=GPU)
    gemm_base._get_cudnn_handle(GPU, torch.cuda.current_stream(GPU))
    versions = {
        "flashinfer": flashinfer.__version__,
        "cuDNN": cudnn.backend_version(),
        "frontend": version("nvidia-cudnn-frontend"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(GPU),
        "SM": ".".join(map(str, torch.cuda.get_device_capability(GPU))),
    }
    print("versions " + json.dumps(versions), flush=True)
    for name, prepare in Paths().all.items():
        print("path " + json.dumps({"name": name, **run(prepare, graphs, cache)}), flush=True)
    if cache is not None:
        stats = {f"{source}: {reason}": number for (source, reason), number in cache.stats().items()}
        print("stats " + json.dumps(stats), flush=True)
        cache.close()


if __name__ == "__main__":
    main()
