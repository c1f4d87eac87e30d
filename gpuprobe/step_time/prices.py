"""Prices of the calls of a step on one GPU: seconds, as ranges, with the source of every figure.

No GPU is needed. What is measured, fitted or estimated is in `matmul`, `attention`, `traffic`,
`convolution` and `collective`; the data sheets are in `speeds`.
"""

from __future__ import annotations

from typing import Final

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import attention, collective, convolution, matmul, traffic
from gpuprobe.step_time.calibration import Calibration, Corrections, own_calibration
from gpuprobe.step_time.price import Factors, Price, Priced, PriceSource
from gpuprobe.step_time.speeds import Speeds, all_speeds

_HOST_CALL: Final = Price(2.5e-6, 8e-6, 30e-6, PriceSource.GENERIC)
_HOST_LAUNCH: Final = Price(1.8e-6, 2.6e-6, 5e-6, PriceSource.GENERIC)
_HOST: Final = (
    "host: a launch takes 2.3 to 2.8 µs on the processors of arXiv 2504.11750; an eager operator "
    "of PyTorch 5 to 25 µs from Python, less from its autograd thread; 8.5 to 15 µs on average in "
    "a step of 2,000 on an H200 (tests/recorded/h200/overhead.json); 16 to 36 µs in transformers' "
    "Llama 7B (about 1,500 launches in 24 to 55 ms a token: h2oai/h2ogpt, perf.md)"
)


class Prices:
    """The prices of one GPU.

    ``network``: GB/s of each GPU's network adapter for collectives of several nodes, 0 if unknown.
    ``measured``: calls that were measured on that card, which correct the built-in prices.
    ``host_call`` is the host's time for one operator in eager mode, ``host_launch`` that for one
    further launch.
    """

    host_call: Price = _HOST_CALL
    host_launch: Price = _HOST_LAUNCH

    def __init__(
        self, speeds: Speeds, network: float = 0.0, measured: Calibration | None = None
    ) -> None:
        self.name: str = speeds.name
        self._speeds = speeds
        self._network = network
        self._provenance: dict[str, None] = {}
        self._known: dict[tuple[Work, int], Price | Unavailable] = {}
        self._corrections = None if measured is None else Corrections(measured, self._seconds)
        host = None if measured is None else measured.host
        if measured is not None and host is not None:
            self.host_call = host
            self._provenance[measured.provenance] = None
        self._provenance[_HOST] = None

    def _seconds(self, work: Work, kernels: int) -> float:
        priced = self._priced(work, kernels)
        return 0.0 if isinstance(priced, Unavailable) else priced.price.expected

    def kept(self, work: Work) -> Factors:
        """How far off the speed may be that multiplications keep under load."""
        attention = work.kind in (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD)
        low, high = self._speeds.kept if attention else self._speeds.sustained
        middle = (low + high) / 2
        return Factors(middle / high, middle / low)

    @property
    def bandwidth(self) -> float:
        """Of the GPU's memory, bytes a second."""
        return self._speeds.bandwidth

    def rate(self, dtype: str) -> float | Unavailable:
        """The peak for products of that type, multiplications and additions a second."""
        return self._speeds.rate(dtype)

    @property
    def provenance(self) -> tuple[str, ...]:
        """A line for each source of the prices so far."""
        return tuple(self._provenance)

    def of(self, work: Work, kernels: int) -> Price | Unavailable:
        """Seconds on the GPU of a call that launched that many kernels, or why they are unknown."""
        known = self._known.get((work, kernels))
        if known is not None:
            return known
        priced = self._priced(work, kernels)
        if self._corrections is not None:
            priced = self._corrections.of(work, priced)
        if isinstance(priced, Unavailable):
            result: Price | Unavailable = priced
        else:
            self._provenance[priced.provenance] = None
            result = priced.price
        self._known[work, kernels] = result
        return result

    def _priced(self, work: Work, kernels: int) -> Priced | Unavailable:
        if work.kind is WorkKind.MATMUL:
            return matmul.price(work, self._speeds, kernels)
        if work.kind in (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD):
            return attention.price(work, self._speeds, kernels)
        if work.kind in (WorkKind.CONVOLUTION, WorkKind.CONVOLUTION_BACKWARD):
            return convolution.price(work, self._speeds, kernels)
        if work.kind in (WorkKind.ELEMENTS, WorkKind.INDEXED, WorkKind.COMPILED):
            return traffic.price(work, self._speeds, kernels)
        if work.kind is WorkKind.COPY:
            return traffic.price_copy(work, self._speeds, kernels)
        if work.kind is WorkKind.COLLECTIVE:
            return collective.price(work, self._speeds, self._network)
        if work.operator.startswith("Triton"):
            return Unavailable("how much its matrix products multiply is unknown")
        return Unavailable(f"no speed is known of {work.operator}: its kernels are a library's own")


def prices(gpu: str, network: float = 0.0) -> Prices | Unavailable:
    """The prices of the GPU that the catalogue has under this name, corrected by the user's own
    measurements if they are those of this GPU. ``network``: see `Prices`. Raises ConfigError for a
    file of measurements that is not one.
    """
    speeds = all_speeds().get(gpu)
    if speeds is None:
        return Unavailable(f"no speeds are known of {gpu}")
    own = own_calibration()
    return Prices(speeds, network, own if own is not None and own.gpu == gpu else None)
