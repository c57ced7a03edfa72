"""Optional zstd around each tensor: smaller files for more time of the writer's thread."""

from __future__ import annotations

from collections.abc import Callable

from torsh_distributed.errors import FeatureNotAvailable

Compress = Callable[[memoryview], bytes]


def compressor(level: int) -> Compress | None:
    """A function that compresses one tensor's archive at zstd's `level`; None for level 0."""
    if level == 0:
        return None
    try:
        import zstandard
    except ImportError as error:
        raise FeatureNotAvailable(
            f"checkpoint.compression_level = {level} needs zstandard",
            hint='pip install "torsh-distributed[zstd]", or set checkpoint.compression_level = 0',
        ) from error
    compress: Compress = zstandard.ZstdCompressor(level=level).compress
    return compress


def decompress(data: bytes, num_bytes: int) -> bytes:
    """Undo it; `num_bytes` is the most to expect. ValueError for what is damaged or longer."""
    try:
        import zstandard
    except ImportError as error:
        raise FeatureNotAvailable(
            "this checkpoint is compressed, and zstandard is not installed",
            hint='pip install "torsh-distributed[zstd]"',
        ) from error
    try:
        # The size that the data itself names is what the library would take memory for.
        if zstandard.frame_content_size(data) > num_bytes:
            raise ValueError("it is longer than its tensor")
        found: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    return found
