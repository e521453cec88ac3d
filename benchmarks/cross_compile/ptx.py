"""Runs PTX on a CPU, bit for bit, to see what compiled code rounds and what it does not.

All threads of all blocks run in step, as lanes of numpy arrays. That is enough for what Inductor writes for casts and
optimizer steps: branches that all threads take alike, shuffles within a warp, shared memory with barriers.

Exact: integers, conversions, add, sub, mul, fma, sqrt.rn, comparisons. Not exact on a GPU, and rounded correctly here:
`div.full` and `div.approx`, which may be wrong by 2 units in the last place. Anything else raises NotImplementedError.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Lanes = np.ndarray[Any, Any]

_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);?$")
_WARP = 32
_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """`guard` is a predicate register, and whether it must be false."""

    guard: tuple[str, bool] | None
    op: str
    operands: tuple[str, ...]


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and the index that each label stands before."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    body = ptx[ptx.index("\n{") + 2 : ptx.rindex("}")]
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith((".", "{", "}")):
            found = _LINE.match(line)
            if found is None:
                raise NotImplementedError(line)
            negated, guard, op, rest = found.groups()
            operands = tuple(re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", rest))
            instructions.append(Instruction((guard, bool(negated)) if guard else None, op, operands))
    return instructions, labels


def run(ptx: str, arguments: list[Tensor | int], *, grid: tuple[int, int, int], threads: int) -> None:
    """Run a kernel on CPU tensors, which it writes in place. `grid` counts blocks along x, y and z."""
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in arguments if isinstance(t, Tensor)}
    places, size = {}, 64
    for pointer, storage in buffers.items():
        places[pointer] = size
        size += -(-len(storage) // 64) * 64 + 64
    memory = np.zeros(size, dtype=np.uint8)
    views = {p: torch.frombuffer(memory, dtype=torch.uint8)[at : at + len(buffers[p])] for p, at in places.items()}
    for pointer, view in views.items():
        view.copy_(torch.empty(0, dtype=torch.uint8).set_(buffers[pointer]))
    values = [
        a if isinstance(a, int) else places[a.untyped_storage().data_ptr()] + a.storage_offset() * a.itemsize
        for a in arguments
    ]
    _Threads(memory, values, grid, threads).run(*parse(ptx))
    for pointer, view in views.items():
        torch.empty(0, dtype=torch.uint8).set_(buffers[pointer]).copy_(view)


class _Threads:
    """Registers of all threads, and their memories."""

    def __init__(self, memory: Lanes, arguments: list[int], grid: tuple[int, int, int], threads: int) -> None:
        blocks = grid[0] * grid[1] * grid[2]
        self.count, self.memory, self.arguments = blocks * threads, memory, arguments
        lane = np.arange(self.count)
        block = lane // threads
        self.block, self.shared = block, np.zeros((blocks, 1 << 17), dtype=np.uint8)
        self.registers: dict[str, Lanes] = {
            "%tid.x": (lane % threads).astype(np.uint32),
            "%ctaid.x": (block % grid[0]).astype(np.uint32),
            "%ctaid.y": (block // grid[0] % grid[1]).astype(np.uint32),
            "%ctaid.z": (block // (grid[0] * grid[1])).astype(np.uint32),
        }

    def run(self, instructions: list[Instruction], labels: dict[str, int]) -> None:
        at = 0
        with np.errstate(all="ignore"):
            while at < len(instructions):
                one = instructions[at]
                mask = self._mask(one.guard)
                at += 1
                if one.op == "ret":
                    return
                if one.op.split(".")[0] == "bra":
                    if mask.any() != mask.all():
                        raise NotImplementedError("threads branch apart")
                    at = labels[one.operands[0]] if mask.all() else at
                else:
                    self._execute(one.op.split("."), one.operands, mask)

    def _mask(self, guard: tuple[str, bool] | None) -> Lanes:
        if guard is None:
            return np.ones(self.count, dtype=bool)
        return self.registers[guard[0]] ^ guard[1]

    def _execute(self, op: list[str], operands: tuple[str, ...], mask: Lanes) -> None:
        name = op[0]
        if name in ("bar", "createpolicy"):
            return
        if name in ("ld", "st"):
            self._move(op, operands, mask)
        elif name in ("ldmatrix", "shfl"):
            {"ldmatrix": self._ldmatrix, "shfl": self._shuffle}[name](op, operands)
        elif name == "setp":
            self._compare(op, operands)
        else:
            target, *rest = operands
            self._put(target, self._compute(op, rest), mask)

    def _put(self, target: str, value: Lanes, mask: Lanes) -> None:
        if target.startswith("{"):  # halves of a number
            for i, name in enumerate(target.strip("{} ").split(",")):
                if name.strip() != "_":
                    self._put(
                        name.strip(),
                        value.view(f"u{value.itemsize}") >> np.uint64(16 * i).astype(f"u{value.itemsize}"),
                        mask,
                    )
            return
        dtype = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32}[re.match(r"%[a-z]+", target)[0]]  # type: ignore[index]
        bits = np.broadcast_to(value, self.count)
        bits = bits.view(f"u{bits.itemsize}") if bits.dtype.kind in "fi" else bits
        bits = bits.astype(dtype)
        self.registers[target] = bits if mask.all() else np.where(mask, bits, self.registers.get(target, bits * 0))

    def get(self, operand: str, kind: str) -> Lanes:
        """An operand's value as `kind`, such as f32, bf16 (widened), s32, b64 or pred."""
        if operand.startswith("{"):
            low, high = (self.get(o.strip(), "u16").astype(np.uint32) for o in operand.strip("{} ").split(","))
            raw = low | (high << np.uint32(16))
        elif operand.startswith("%"):
            # Compilers leave a half that nobody reads unset.
            raw = self.registers.get(operand, np.zeros(self.count, dtype=np.uint32))
        elif operand.startswith("0f"):
            raw = np.full(self.count, int(operand[2:], 16), dtype=np.uint32)
        elif operand == "global_smem":
            raw = np.zeros(self.count, dtype=np.uint64)
        else:
            raw = np.full(self.count, int(operand.rstrip("U"), 0), dtype=np.int64).astype(np.uint64)
        if kind == "pred":
            return raw.astype(bool)
        if kind == "bf16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        bits = int(kind[1:])
        unsigned = raw.astype(f"u{bits // 8}")
        return unsigned if kind[0] in "ub" else unsigned.view(f"{'f' if kind[0] == 'f' else 'i'}{bits // 8}")

    def _compute(self, op: list[str], operands: list[str]) -> Lanes:
        name, kind = op[0], op[-1]
        if name == "cvt":
            return self._convert(op, operands)
        if kind in ("bf16x2", "s16x2", "u16x2"):
            halves = ([self.get(o, "b32") >> np.uint32(s) for o in operands] for s in (0, 16))
            low, high = (_of_halves(name, kind, half).view(np.uint16).astype(np.uint32) for half in halves)
            return low | (high << np.uint32(16))
        if name in ("mul", "mad") and op[1] in ("wide", "lo"):
            wide = {"s32": "i8", "u32": "u8"}[kind] if op[1] == "wide" else self.get(operands[0], kind).dtype
            product = self.get(operands[0], kind).astype(wide) * self.get(operands[1], kind).astype(wide)
            return product if name == "mul" else product + self.get(operands[2], _sized(kind, op[1])).astype(wide)
        if name in ("selp", "prmt", "bfe", "mov"):
            return self._select(name, kind, operands)
        values = [self.get(o, kind) for o in operands]
        if name == "mul" and op[1] == "hi":
            product = values[0].astype({"s32": "i8", "u32": "u8"}[kind]) * values[1]
            return (product >> 32).astype(values[0].dtype)
        if kind in ("f32", "bf16"):
            result = _FLOAT[name](*values) if name in _FLOAT else _extreme(op, *values)
            return result if kind == "f32" else _to_bf16(result)
        if name in ("shl", "shr"):
            distance = self.get(operands[1], "u32").astype(np.uint64)
            width = values[0].itemsize * 8
            moved = (np.left_shift if name == "shl" else np.right_shift)(
                values[0], np.minimum(distance, width - 1).astype(values[0].dtype)
            )
            filled = np.where(values[0] < 0, -1, 0).astype(values[0].dtype) if name == "shr" else moved * 0
            return np.where(distance < width, moved, filled)
        if name not in _INTEGER:
            raise NotImplementedError(".".join(op))
        return _INTEGER[name](*values)

    def _select(self, name: str, kind: str, operands: list[str]) -> Lanes:
        if name == "selp":
            bits = f"b{16 if kind == 'bf16' else int(kind[1:])}"
            return np.where(self.get(operands[2], "pred"), self.get(operands[0], bits), self.get(operands[1], bits))
        if name == "mov":
            return self.get(operands[0], kind)
        a, b, c = (self.get(o, "u32") for o in operands)
        if name == "bfe":
            width = int(operands[2])
            field = (a >> b) & np.uint32((1 << width) - 1)
            if kind == "s32":
                return (field << np.uint32(32 - width)).view(np.int32) >> np.int32(32 - width)
            return field
        both, result = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32)), np.zeros(self.count, np.uint32)
        for i in range(4):
            which = (c >> np.uint32(4 * i)) & np.uint32(7)
            byte = (both >> (which.astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            only_sign = (c >> np.uint32(4 * i)) & np.uint32(8) != 0
            byte = np.where(only_sign, (byte >> np.uint64(7)) * np.uint64(255), byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * i)
        return result

    def _convert(self, op: list[str], operands: list[str]) -> Lanes:
        to, of = op[-2], op[-1]
        if to in ("e4m3x2", "e5m2x2"):  # the first operand goes to the upper byte
            high, low = (_to_fp8(self.get(o, of), to) for o in operands)
            return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))
        if of in ("e4m3x2", "e5m2x2"):
            both = self.get(operands[0], "u16")
            low, high = (_from_fp8((both >> np.uint16(s)).astype(np.uint8), of).astype(np.uint32) for s in (0, 8))
            return low | (high << np.uint32(16))
        if to == "bf16x2":
            high, low = (_to_bf16(self.get(o, of)).astype(np.uint32) for o in operands)
            return low | (high << np.uint32(16))
        value = self.get(operands[0], of)
        if to == "bf16":
            return _to_bf16(value)
        if "rni" in op:
            value = np.rint(value)
        return value.astype({"f": "f", "u": "u", "s": "i"}[to[0]] + str(int(to[1:]) // 8))

    def _compare(self, op: list[str], operands: tuple[str, ...]) -> None:
        targets, *rest = operands
        if op[-1] == "bf16x2":
            for target, shift in zip(targets.split("|"), (0, 16), strict=True):
                a, b = (_widened(self.get(o, "b32") >> np.uint32(shift)) for o in rest[:2])
                self._put(target, _compared(op[1], a, b), self._mask(None))
            return
        a, b = (self.get(o, op[-1]) for o in rest[:2])
        self._put(targets, _compared(op[1], a, b), self._mask(None))

    def _move(self, op: list[str], operands: tuple[str, ...], mask: Lanes) -> None:
        place, registers = operands[:2] if op[0] == "st" else operands[1::-1]
        names = [r.strip() for r in registers.strip("{} ").split(",")]
        size = int(op[-1][1:]) // 8
        base, _, offset = place.strip("[] ").replace(" ", "").partition("+")
        if op[1] == "param":
            self._put(names[0], np.full(self.count, self._argument(base), dtype=np.int64), mask)
            return
        for i, name in enumerate(names):
            address = self.get(base, "u64").astype(np.int64) + int(offset or 0) + i * size
            where = np.where(mask, address, 0)[:, None] + np.arange(size)
            memory, index = (
                (self.memory, (where,)) if op[1] == "global" else (self.shared, (self.block[:, None], where))
            )
            if op[0] == "ld":
                loaded = np.ascontiguousarray(memory[index]).view(f"u{size}")[:, 0]
                self._put(name, loaded, mask)
            else:
                stored = np.ascontiguousarray(self.get(name, f"b{8 * size}"))[:, None].view(np.uint8)
                memory[tuple(x[mask] if x.shape[0] == self.count else x for x in index)] = stored[mask]

    def _argument(self, name: str) -> int:
        index = int(name.rpartition("_")[2])
        return self.arguments[index] if index < len(self.arguments) else 0

    def _shuffle(self, op: list[str], operands: tuple[str, ...]) -> None:
        target, source, other, *_ = operands
        lane = np.arange(self.count)
        b = self.get(other, "u32").astype(np.int64)
        within = lane % _WARP ^ b if op[2] == "bfly" else b % _WARP
        self._put(target, self.get(source, "u32")[lane // _WARP * _WARP + within], self._mask(None))

    def _ldmatrix(self, op: list[str], operands: tuple[str, ...]) -> None:
        names = [r.strip() for r in operands[0].strip("{} ").split(",")]
        base, _, offset = operands[1].strip("[] ").replace(" ", "").partition("+")
        address = self.get(base, "u64").astype(np.int64) + int(offset or 0)
        lane = np.arange(self.count)
        warp, t = lane // _WARP * _WARP, lane % _WARP
        for i, name in enumerate(names):
            halves = []
            for half in (0, 1):
                row, column = (2 * (t % 4) + half, t // 4) if "trans" in op else (t // 4, 2 * (t % 4) + half)
                at = address[warp + 8 * i + row] + 2 * column
                pair = self.shared[self.block[:, None], at[:, None] + np.arange(2)]
                halves.append(np.ascontiguousarray(pair).view(np.uint16)[:, 0].astype(np.uint32))
            self._put(name, halves[0] | (halves[1] << np.uint32(16)), self._mask(None))


def _sized(kind: str, mode: str) -> str:
    return f"{kind[0]}64" if mode == "wide" else kind


def _of_halves(name: str, kind: str, values: list[Lanes]) -> Lanes:
    """The operation on one half of each register, given in the lower bits."""
    if kind == "bf16x2":
        return _to_bf16(_FLOAT[name](*(_widened(x) for x in values)))
    return _INTEGER[name](*(x.astype({"s16x2": np.int16, "u16x2": np.uint16}[kind]) for x in values))


def _widened(bits: Lanes) -> Lanes:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(x: Lanes) -> Lanes:
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


_FP8 = {"e4m3x2": (torch.float8_e4m3fn, 448.0), "e5m2x2": (torch.float8_e5m2, 57344.0)}


def _to_fp8(x: Lanes, kind: str) -> Lanes:
    dtype, largest = _FP8[kind]
    codes = torch.from_numpy(np.clip(x, -largest, largest)).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)


def _from_fp8(codes: Lanes, kind: str) -> Lanes:
    half = torch.from_numpy(np.ascontiguousarray(codes)).view(_FP8[kind][0]).to(torch.float16)
    return half.view(torch.int16).numpy().view(np.uint16)


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a · b + c in float32, rounded once: the sum in float64 is rounded to odd before it is narrowed."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (error != 0) & even
    odd = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def _compared(relation: str, a: Lanes, b: Lanes) -> Lanes:
    if a.dtype.kind != "f":
        return _COMPARE[relation](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if relation in ("nan", "num"):
        return unordered ^ (relation == "num")
    if relation in _COMPARE:
        return _COMPARE[relation](a, b) & ~unordered
    return _COMPARE[relation[:-1]](a, b) | unordered  # such as leu


def _extreme(op: list[str], a: Lanes, b: Lanes) -> Lanes:
    """max or min: with .NaN a NaN wins, otherwise the number."""
    function = {"max": np.fmax, "min": np.fmin} if "NaN" not in op else {"max": np.maximum, "min": np.minimum}
    return function[op[0]](a, b)


_FLOAT: dict[str, Callable[..., Lanes]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": _fma, "sqrt": np.sqrt,
    "abs": np.abs, "neg": np.negative, "copysign": lambda sign, size: np.copysign(size, sign),
}  # fmt: skip
_INTEGER: dict[str, Callable[..., Lanes]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
