"""CompressionStats: bytes, times and measured error of compression so far."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(kw_only=True, slots=True)
class CompressionStats:
    """Running totals of one compressor on this rank."""

    num_tensors: int = 0
    """Tensors that were compressed."""

    num_dense: int = 0
    """Tensors sent uncompressed: small or named ones, and all of them at dense steps, warm-up included."""

    num_nonfinite: int = 0
    """Buckets not averaged because some rank's gradient held NaN or infinity."""

    bytes_before: int = 0
    """Bytes of all gradients as this rank would have sent them uncompressed: once by hand, and in an average of P ranks
    2 (P - 1) / P times, which is what a ring sends."""

    bytes_on_wire: int = 0
    """Bytes of payload that this rank sent instead, as the codec counts them."""

    error_norm: float | None = None
    """Norm of what the last measured message left out; None until one was measured."""

    original_norm: float | None = None
    """Norm of the tensor that the message was made from."""

    encode_s: float = 0.0
    """Seconds spent in `compress`."""

    decode_s: float = 0.0
    """Seconds spent in `decompress`."""

    exchange_s: float = 0.0
    """Seconds spent in averages over a group: encoding, transfer and decoding together."""

    @property
    def ratio(self) -> float | None:
        """Bytes on the wire over bytes before; None before anything was sent."""
        return self.bytes_on_wire / self.bytes_before if self.bytes_before else None

    @property
    def relative_error(self) -> float | None:
        """Norm of what the last measured message left out, relative to the tensor it was made from."""
        if self.error_norm is None or not self.original_norm:
            return None
        return self.error_norm / self.original_norm

    def to_dict(self) -> dict[str, float | int | None]:
        """All fields and ratios, ready for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "ratio": self.ratio, "relative_error": self.relative_error}
