"""AdamW's state in host memory, for a model whose state is larger than the memory of its GPU.

Weights stay on the GPU. The moments and the low bits of the masters are on shelves in pinned host
memory, one shelf per decoder layer, and so are the float32 sums of the gradients of its linear
layers. Backward needs the sums of one layer at a time, and an update everything of one layer. Each
shelf is copied to the GPU while the one before it is in use, and copied back while the next one is.
The same kernels see the same numbers as if all of it stayed there: the result has the same bits.

On a CPU, where the tests run, copies are immediate.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rather.arithmetic import round_up
from rather.optim.adamw import ParameterState
from rather.optim.summing import SummingLinear, Totals

LEAST = 1 << 20  # weights of a parameter that is worth a shelf
SLOTS = 3  # shelves whose sums are on the GPU at a time: in use, arriving, leaving
LOTS = 2  # the same for moments and low bits
ALIGNED = 256  # bytes
KEPT = 10  # bytes of a weight on its shelf: two moments and 16 low bits
BYTES_ON_HOST = KEPT + 4  # with the sum of its gradients
_LAYER = re.compile(r"(.*\.layers\.\d+)\.")


def pinned(size: int, owner: object) -> Tensor:
    """Return bytes of pinned memory, released with their owner.

    Pinned by hand: torch's own pinned memory is rounded up to a power of two.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        torch.cuda.check_error(status)
        weakref.finalize(owner, _unpin, buffer)  # freed while pinned, it could not be used again
    return buffer


def _unpin(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


class Shelf:
    """What AdamW keeps of the weights of one layer, or of one weight outside of the layers."""

    def __init__(self, states: Sequence[ParameterState], number: int) -> None:
        self.states = states
        self.number = number
        self.places: list[tuple[ParameterState, str, int, Tensor]] = []  # name, first byte
        size = 0
        for state in states:
            for name, tensor in state.stored().items():
                self.places.append((state, name, size, tensor))
                size = round_up(size + tensor.nbytes, ALIGNED)
        self.kept = pinned(size, self)
        for _, _, first, tensor in self.places:
            _view(self.kept, first, tensor).copy_(tensor)
        self.use(self.kept)
        self.totals: Totals | None = None  # sums of gradients, while they are on the device
        self.sums: Tensor | None = None  # the same in pinned memory
        self.is_here = False  # the sums are on the device, or on their way to it
        self.is_zero = True  # the sums of this step are zero
        self.sums_arrived: Any = None  # events; None on a CPU
        self.sums_stored: Any = None
        self.kept_stored: Any = None

    def use(self, buffer: Tensor) -> None:
        """Let the states use what is in a buffer laid out like `kept`."""
        for i, (state, name, first, tensor) in enumerate(self.places):
            view = _view(buffer, first, tensor)
            state.store(name, view)
            self.places[i] = (state, name, first, view)  # the first tensors can be freed

    @property
    def linears(self) -> list[SummingLinear]:
        return [state.linear for state in self.states if state.linear and state.sums_wide]


def _view(buffer: Tensor, first: int, like: Tensor) -> Tensor:
    return buffer[first : first + like.nbytes].view(like.dtype).view(like.shape)


class HostState:
    """The shelves of an optimizer, and the copies between them and the device.

    A parameter with at least `least` weights has a shelf; with None, no parameter has one.
    """

    def __init__(self, states: Iterable[ParameterState] = (), least: int | None = None) -> None:
        groups: dict[str, list[ParameterState]] = {}
        for state in states:
            is_large = least is not None and state.parameter.numel() >= least
            if state.form == "split" and is_large:
                layer = _LAYER.match(state.name)
                groups.setdefault(layer[1] if layer else state.name, []).append(state)
        self.shelves = [Shelf(group, number) for number, group in enumerate(groups.values())]
        self.states = {state for shelf in self.shelves for state in shelf.states}
        devices = [state.parameter.device for state in self.states]
        self.device = devices[0] if devices else torch.device("cpu")
        self.inward = self.outward = None
        if self.device.type == "cuda":
            self.inward, self.outward = (torch.cuda.Stream(self.device) for _ in range(2))
        self.slots: Tensor | None = None
        self.summing: set[ParameterState] = set()  # whose sums of gradients are on shelves
        self.slot_free: list[Any] = [None] * SLOTS  # when the last user has left it

    # --- sums of gradients ---

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Bring the sums of each layer before its backward pass, and store them after it."""
        by_parameter = {s.parameter: shelf for shelf in self.shelves for s in shelf.states}
        for layer in layers:
            shelf = next((by_parameter[p] for p in layer.parameters() if p in by_parameter), None)
            if shelf is not None:
                layer.register_forward_pre_hook(_when_input_has_gradient(self._store, shelf))
                layer.register_forward_hook(_when_output_has_gradient(self._bring, shelf))

    def begin(self) -> None:
        """Begin a step: all sums are zero."""
        if self.slots is None:
            self._make_slots()
        for shelf in self._summing:
            shelf.is_zero = True
            shelf.is_here = False
            shelf.totals.give()

    def end(self) -> None:
        """End a step, or give it up."""
        now = self._now()
        self.slot_free = [now] * SLOTS
        for shelf in self._summing:
            shelf.is_here = False
            shelf.totals.take()

    @property
    def _summing(self) -> list[Any]:
        return [shelf for shelf in self.shelves if shelf.totals is not None]

    def _make_slots(self) -> None:
        linears = {shelf: shelf.linears for shelf in self.shelves if shelf.linears}
        sizes = {shelf: Totals.size_of(linears[shelf]) for shelf in linears}
        self.slots = torch.empty(SLOTS, max(sizes.values(), default=0), device=self.device)
        for number, (shelf, size) in enumerate(sizes.items()):
            shelf.number = number
            self.summing |= {state for state in shelf.states if state.linear}
            shelf.totals = Totals(linears[shelf], self.slots[number % SLOTS, :size])
            shelf.sums = pinned(4 * size, shelf).view(torch.float32)

    def _fetch(self, shelf: Shelf) -> None:
        """Start to bring the sums of a shelf."""
        if shelf.is_here:
            return
        assert shelf.totals is not None
        slot = shelf.number % SLOTS
        source = None if shelf.is_zero else shelf.sums
        after = (self.slot_free[slot], shelf.sums_stored)
        shelf.sums_arrived = _copy(shelf.totals.flat, source, self.inward, after)
        shelf.is_here = True

    def _neighbour(self, shelf: Shelf, step: int) -> Shelf | None:
        number = shelf.number + step
        summing = self._summing
        return summing[number] if 0 <= number < len(summing) else None

    def _bring(self, shelf: Shelf) -> None:
        if shelf.totals is None:
            return
        self._fetch(shelf)
        if next_shelf := self._neighbour(shelf, -1):  # backward goes from the last to the first
            self._fetch(next_shelf)
        _wait(shelf.sums_arrived)

    def _store(self, shelf: Shelf) -> None:
        if shelf.totals is None or not shelf.is_here:
            return
        assert shelf.sums is not None
        shelf.sums_stored = _copy(shelf.sums, shelf.totals.flat, self.outward, (self._now(),))
        self.slot_free[shelf.number % SLOTS] = shelf.sums_stored
        shelf.is_zero = shelf.is_here = False

    def gradients_in_turn(self) -> Iterator[Sequence[ParameterState]]:
        """Yield the states of each shelf whose sums it holds, while these are on the device."""
        for shelf in self._summing:
            self._fetch(shelf)
            if next_shelf := self._neighbour(shelf, 1):
                self._fetch(next_shelf)
            _wait(shelf.sums_arrived)
            yield [state for state in shelf.states if state in self.summing]
            self.slot_free[shelf.number % SLOTS] = self._now()
            shelf.is_here = False

    # --- updates ---

    def in_turn(self) -> Iterator[Sequence[ParameterState]]:
        """Yield the states of each shelf while everything of them is on the device."""
        largest = max((shelf.kept.nbytes for shelf in self.shelves), default=0)
        lots = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(LOTS)]
        lot_free: list[Any] = [self._now()] * LOTS
        arrived: dict[int, Any] = {}

        def fetch(number: int) -> None:
            shelf = self.shelves[number]
            lot = number % LOTS
            after = (lot_free[lot], shelf.kept_stored)
            target = lots[lot][: shelf.kept.nbytes]
            arrived[number] = _copy(target, shelf.kept, self.inward, after)
            if shelf.totals is not None:
                self._fetch(shelf)

        for number, shelf in enumerate(self.shelves):
            if number not in arrived:
                fetch(number)
            if number + 1 < len(self.shelves):
                fetch(number + 1)
            _wait(arrived[number])
            _wait(shelf.sums_arrived)
            on_device = lots[number % LOTS][: shelf.kept.nbytes]
            shelf.use(on_device)
            yield shelf.states
            shelf.use(shelf.kept)
            shelf.kept_stored = _copy(shelf.kept, on_device, self.outward, (self._now(),))
            lot_free[number % LOTS] = shelf.kept_stored
            if shelf.totals is not None:
                self.slot_free[shelf.number % SLOTS] = self._now()
                shelf.is_here = False
        for event in lot_free:  # the lots are freed now
            _wait(event)

    def settle(self) -> None:
        """Wait until the shelves hold what was copied to them."""
        if self.outward is not None:
            self.outward.synchronize()

    def _now(self) -> Any:
        """Return the event of what the device has been given to do so far."""
        if self.device.type != "cuda":
            return None
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def _wait(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _copy(target: Tensor, source: Tensor | None, stream: Any, after: Sequence[Any]) -> Any:
    """Copy, or fill with zeros, on a stream after some events; return the event of its end."""
    if stream is None:
        target.zero_() if source is None else target.copy_(source)
        return None
    for event in after:
        if event is not None:
            stream.wait_event(event)
    with torch.cuda.stream(stream):
        target.zero_() if source is None else target.copy_(source, non_blocking=True)
        done: Any = torch.cuda.Event()
        done.record(stream)
    return done


def _when_input_has_gradient(act: Callable[[Shelf], None], shelf: Shelf) -> Any:
    """Return a hook of a layer: its backward pass is over when its input has a gradient."""

    def hook(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _gradient: act(shelf))

    return hook


def _when_output_has_gradient(act: Callable[[Shelf], None], shelf: Shelf) -> Any:
    """Return a hook of a layer: its backward pass begins when its output has a gradient."""

    def hook(_layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if torch.is_grad_enabled() and states.requires_grad:
            states.register_hook(lambda _gradient: act(shelf))

    return hook
