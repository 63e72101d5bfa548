"""Running ready graphs on the device: inputs made from the tensors' own shapes, comparison of outputs, kernel time.

Memory, streams, events and captures are cuda-python's (the driver API, as it is in 12.6 and in 13). No more memory is
taken than was said; what needs more is refused.

Not promised: that a plan comes back. One that hangs hangs its process, which somebody outside has to end.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from plancache.cudnn import device as devices
from plancache.cudnn import frontend, libraries
from plancache.cudnn.inputs import Operand, operands
from plancache.cudnn.numbers import Difference, difference, is_empty
from plancache.errors import RunError

# Executes in one captured CUDA graph, and how often that is replayed; fewer where one takes long.
LAUNCHES, REPLAYS = 20, 5
_LONGEST = 50_000.0  # microseconds of one replay
_CHUNK = 4 << 20  # bytes on their way between host and device
# Errors that leave the context as it was: a value, memory, what is not supported or not captured into a graph.
_OUT_OF_MEMORY = 2
_PASSING = {1, _OUT_OF_MEMORY, 801, *range(900, 911)}
_SHARE = 0.8  # of the free memory that is taken unless it is said


@dataclass(frozen=True)
class Timing:
    """Microseconds of one execute on the device: the median of the replays, and the best of them."""

    median: float
    best: float


@dataclass
class Operands:
    """Buffers on the device for one graph, and for others with the same tensors.

    Attributes:
        listed: what they are for.
        inputs: addresses by uid; of numbers that are given by value, in the host's memory.
        kept: what holds those.
    """

    listed: list[Operand]
    inputs: dict[int, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    @property
    def outputs(self) -> list[Operand]:
        """Those that the graph writes."""
        return [one for one in self.listed if one.output]


class Runner:
    """A stream, a handle and a bounded amount of memory on one device; a context manager.

    Args:
        ordinal: of the device; None is the current one.
        memory: bytes that buffers and workspaces may take together; None is most of what is free.

    Raises:
        DeviceError: there is no CUDA device here.
        RunError: the device cannot be used.
    """

    def __init__(self, ordinal: int | None = None, memory: int | None = None) -> None:
        self._driver = devices.driver()
        self._enter_context(0 if ordinal is None and devices.current_ordinal() is None else ordinal)
        module = libraries.cudnn()
        self.handle = module.create_handle()
        #: What graphs that run here are made with.
        self.place: dict[str, Any] = {"handle": self.handle}
        self._stream = self._ask(self._driver.cuStreamCreate(1), "cuStreamCreate")  # 1: beside the default stream
        module.set_stream(handle=self.handle, stream=int(self._stream))
        free, _ = self._ask(self._driver.cuMemGetInfo(), "cuMemGetInfo")
        self.limit = int(_SHARE * free) if memory is None else memory
        self._buffers: dict[int, int] = {}
        self._events = [self._ask(self._driver.cuEventCreate(0), "cuEventCreate") for _ in range(2)]

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. Graphs that run on the handle must be gone by then."""
        gc.collect()
        with suppress(Exception):  # after a fault of the device nothing can be given back, and the process ends
            for address in list(self._buffers):
                self.free(address)
            for event in self._events:
                self._driver.cuEventDestroy(event)
            libraries.cudnn().destroy_handle(self.handle)
            self._driver.cuStreamDestroy(self._stream)
            if self._context is not None:
                self._driver.cuCtxPopCurrent()
                self._driver.cuDevicePrimaryCtxRelease(self._context)

    # ------------------------------------------------------------ memory

    def operands(self, graph: Any) -> Operands:
        """Buffers for a ready graph, its inputs filled.

        Raises:
            RunError: they take more than may be used, or nothing would make sense for an input.
        """
        made = Operands(operands(graph))
        try:
            for operand in made.listed:
                if operand.by_value:
                    number = ctypes.create_string_buffer(operand.content, 16)
                    made.kept.append(number)
                    made.inputs[operand.uid] = ctypes.addressof(number)
                elif not operand.output:
                    made.inputs[operand.uid] = self.allocate(operand.size)
                    self._fill(made.inputs[operand.uid], operand)
        except BaseException:
            self.release(made)
            raise
        return made

    def refill(self, made: Operands) -> None:
        """Put the inputs back to what they were: a plan that computed something else may have written there too."""
        for operand in made.listed:
            if not operand.output and not operand.by_value:
                self._fill(made.inputs[operand.uid], operand)

    def outputs(self, made: Operands) -> dict[int, int]:
        """Addresses of new buffers for the outputs, by uid."""
        found: dict[int, int] = {}
        try:
            for operand in made.outputs:
                found[operand.uid] = self.allocate(operand.size)
        except BaseException:
            for address in found.values():
                self.free(address)
            raise
        return found

    def release(self, made: Operands) -> None:
        """Give the inputs back."""
        for operand in made.listed:
            if operand.uid in made.inputs and not operand.by_value:
                self.free(made.inputs[operand.uid])

    def allocate(self, size: int) -> int:
        """A buffer on the device."""
        size = max(256, size)
        taken = sum(self._buffers.values())
        if taken + size > self.limit:
            raise RunError(
                "a graph's tensors and workspace take more memory than may be used",
                found=f"{taken + size} bytes",
                expected=f"at most {self.limit}",
                todo="Allow more with --memory.",
                memory=True,
            )
        address = int(self._ask(self._driver.cuMemAlloc(size), f"cuMemAlloc({size})"))
        self._buffers[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a buffer back."""
        del self._buffers[address]
        self._ask(self._driver.cuMemFree(address), "cuMemFree")

    def _fill(self, address: int, operand: Operand) -> None:
        """Copy the content once, and then on the device what is there behind it, twice as much each time."""
        content = operand.content
        done = min(len(content), operand.size)
        self._ask(self._driver.cuMemcpyHtoD(address, content, done), "cuMemcpyHtoD")
        while done < operand.size:
            more = min(done, operand.size - done)
            self._ask(self._driver.cuMemcpyDtoD(address + done, address, more), "cuMemcpyDtoD")
            done += more

    def compare(self, made: Operands, expected: Mapping[int, int], found: Mapping[int, int]) -> Difference:
        """The worst difference of all outputs."""
        worst: Difference | None = None
        for operand in made.outputs:
            one = difference(
                self._pairs(expected[operand.uid], found[operand.uid], operand.size), operand.size, operand.data_type
            )
            if worst is None or (worst.right, -worst.largest) > (one.right, -one.largest) or worst.exact:
                worst = one
        if worst is None:
            raise RunError("a graph without outputs shows nothing")
        return worst

    def empty(self, made: Operands, found: Mapping[int, int]) -> bool:
        """Whether all outputs are nothing but zeros and NaN: then a comparison with them proves nothing."""
        return all(
            is_empty(self._read(found[one.uid] + start, min(_CHUNK, one.size - start)), one.data_type)
            for one in made.outputs
            for start in range(0, one.size, _CHUNK)
        )

    def _pairs(self, expected: int, found: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            yield self._read(expected + start, length), self._read(found + start, length)

    def _read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._ask(self._driver.cuMemcpyDtoH(ctypes.addressof(data), address, size), "cuMemcpyDtoH")
        return data.raw

    # ------------------------------------------------------------ running

    def run(self, graph: Any, made: Operands, outputs: Mapping[int, int]) -> None:
        """Execute a ready graph once, with its outputs zeroed before, and wait for it.

        Raises:
            RunError: it could not be launched, or the device is at fault afterwards.
        """
        for operand in made.outputs:
            self._ask(self._driver.cuMemsetD8(outputs[operand.uid], 0, operand.size), "cuMemsetD8")
        self._ask(self._driver.cuCtxSynchronize(), "cuCtxSynchronize")  # the memory is set on another stream
        with _Workspace(self, graph) as workspace:
            self._launch(graph, made, outputs, workspace)
            self._wait()

    def time(self, graph: Any, made: Operands, outputs: Mapping[int, int]) -> Timing:
        """How long one execute takes on the device: a captured CUDA graph of many, replayed."""
        with _Workspace(self, graph) as workspace:

            def launch() -> None:
                self._launch(graph, made, outputs, workspace)

            launch()
            self._wait()
            once = self._measured(launch)
            launches = max(1, min(LAUNCHES, int(_LONGEST / max(once, 1e-3))))
            try:
                return self._captured(launch, launches)
            except RunError as error:
                if error.fault:
                    raise
                # Some plans cannot be captured: measured as they come, with what the host takes between two of them.
                return self._timing([self._measured(launch, launches) for _ in range(REPLAYS)])

    def _captured(self, launch: Callable[[], None], launches: int) -> Timing:
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._ask(driver.cuStreamBeginCapture(self._stream, mode), "cuStreamBeginCapture")
        failed: RunError | None = None
        try:
            for _ in range(launches):
                launch()
        except RunError as error:
            failed = error
        status, captured = driver.cuStreamEndCapture(self._stream)
        if int(status) or failed is not None:
            devices.clear_error()
            if not int(status):
                driver.cuGraphDestroy(captured)
            raise failed or RunError("a plan cannot be captured into a CUDA graph", found=str(status))
        try:
            ready = self._ask(driver.cuGraphInstantiate(captured, 0), "cuGraphInstantiate")
            try:

                def replay() -> None:
                    self._ask(driver.cuGraphLaunch(ready, self._stream), "cuGraphLaunch")

                replay()
                self._wait()
                return self._timing([self._measured(replay) / launches for _ in range(REPLAYS)])
            finally:
                driver.cuGraphExecDestroy(ready)
        finally:
            driver.cuGraphDestroy(captured)

    def _timing(self, taken: list[float]) -> Timing:
        from statistics import median  # 5 ms, and whoever only fills needs none

        return Timing(median(taken), min(taken))

    def _measured(self, call: Callable[[], None], times: int = 1) -> float:
        """Microseconds on the device of one call of several."""
        start, end = self._events
        self._ask(self._driver.cuEventRecord(start, self._stream), "cuEventRecord")
        for _ in range(times):
            call()
        self._ask(self._driver.cuEventRecord(end, self._stream), "cuEventRecord")
        self._wait()
        return 1e3 * float(self._ask(self._driver.cuEventElapsedTime(start, end), "cuEventElapsedTime")) / times

    def _launch(self, graph: Any, made: Operands, outputs: Mapping[int, int], workspace: int) -> None:
        try:
            frontend.execute(graph, {**made.inputs, **outputs}, workspace, self.handle)
        except Exception as error:
            self.check()
            raise RunError("a plan could not be launched", found=f"{type(error).__name__}: {error}") from error

    def _wait(self) -> None:
        self._ask(self._driver.cuStreamSynchronize(self._stream), "a plan's kernels")

    def check(self) -> None:
        """Raise a `RunError` that is a fault if the device's context is of no use any longer."""
        state = int(self._driver.cuStreamQuery(self._stream)[0])
        # Not ready is no error, nor is that a stream is being captured.
        if state not in (0, 600, 900, 901, 906):
            raise RunError("the device is at fault", found=f"CUDA error {state}", fault=True)

    def _ask(self, result: tuple[Any, ...], what: str) -> Any:
        status = int(result[0])
        if status:
            passing, memory = status in _PASSING, status == _OUT_OF_MEMORY
            raise RunError(f"CUDA failed at {what}", found=str(result[0]), fault=not passing, memory=memory)
        return result[1] if len(result) == 2 else result[1:] if len(result) > 2 else None

    def _enter_context(self, ordinal: int | None) -> None:
        """Make a device the current one, as the runtime does; cuDNN's handle is then made on it."""
        self._context: Any = None
        if ordinal is None or ordinal == devices.current_ordinal():
            status, context = self._driver.cuCtxGetCurrent()
            if int(status) == 0 and int(context):
                return
            ordinal = devices.current_ordinal() if ordinal is None else ordinal
        device = self._ask(self._driver.cuDeviceGet(ordinal or 0), f"cuDeviceGet({ordinal})")
        context = self._ask(self._driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        self._ask(self._driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        self._context = device


class _Workspace:
    """The workspace of a ready graph, for as long as it runs."""

    def __init__(self, runner: Runner, graph: Any) -> None:
        self._runner, self._size = runner, int(graph.get_workspace_size())

    def __enter__(self) -> int:
        self._address = self._runner.allocate(self._size) if self._size else 0
        return self._address

    def __exit__(self, *_: object) -> None:
        if self._address:
            with suppress(RunError):  # what went wrong before says more
                self._runner.free(self._address)
