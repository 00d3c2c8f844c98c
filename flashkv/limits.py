"""Every limit of flashkv, with its reason. Options may lower most of them; none is unbounded.

Invariant: numbers that the format fixes are equal to those of engine_native/format.h (tested).
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# ---- fixed by the format ------------------------------------------------------------------------
PAGE_BYTES: Final = 4096
"""Unit of coding, checksum and random access: the sector of nearly all drives."""
KEY_BYTES_MAX: Final = 255
"""A key's length is one byte on flash; engines' keys are 16 to 64 bytes."""
BLOCK_TOKENS_MAX: Final = 1024
"""Tokens a block: the largest chunk of the engines in use (LMCache: 256) times four."""
BLOCKS_PER_RECORD_MAX: Final = 1024
"""A record of 1,024 tokens in one-token blocks; keeps headers below a few hundred KiB."""
PLANES_MAX: Final = 8
"""Planes a group: k, v and scales need four; stays a fixed array in native structures."""
SHARD_BYTES: Final = 16
NAMESPACE_BYTES: Final = 32
DIGEST_BYTES: Final = 16

# ---- geometry -----------------------------------------------------------------------------------
GROUPS_MAX: Final = 64
"""Groups of a geometry: hybrids have 2 to 4; the group's number is one byte on flash."""
LAYERS_MAX: Final = 1024
"""Layers of a plane: the deepest models have about 130; a shard names layers in 16 bits."""
HEADS_MAX: Final = 1024
"""KV heads of a plane: MHA models have up to 128; a shard names heads in 16 bits."""
GROUP_STREAMS_MAX: Final = 1 << 20
"""Streams of a group, layers x heads over its planes: each takes some bytes of a record's header.

Layers over planes, which the data plane bounds by 65,535, stay far below.
"""
VECTOR_BYTES_MAX: Final = 1 * GIB
"""One token of one head. An opaque block is a single vector, hence so much."""
GEOMETRY_JSON_BYTES_MAX: Final = 3072
"""The canonical JSON lies in the superblock's page, beside 128 bytes of fields and some reserve."""

# ---- identity and keys --------------------------------------------------------------------------
IDENTITY_JSON_BYTES_MAX: Final = 64 * KIB
"""Readable identity: kept whole in one record header of the store."""
IDENTITY_FIELD_BYTES_MAX: Final = 16 * KIB
"""One field: model names, rope settings as JSON, adapter names."""
IDENTITY_EXTRAS_MAX: Final = 64
"""Entries of Identity.extras."""
CONTEXT_RANKS_MAX: Final = 65535
"""Context-parallel ranks: 16 bits in the shard's encoding."""
TOKENS_PER_CHAIN_MAX: Final = 1 << 26
"""token_keys: 64 million tokens a call, 256 MiB of ids."""
FINGERPRINT_SAMPLE_BYTES: Final = 64 * KIB
"""weights_fingerprint: bytes hashed at each sample of a file."""
FINGERPRINT_SAMPLES: Final = 64
"""weights_fingerprint: samples a file: 4 MiB read of files of many GB."""

# ---- batches and clients ------------------------------------------------------------------------
BATCH_BLOCKS_MAX: Final = 1 << 16
"""Blocks a call: 64 Ki blocks of 16 tokens are a context of a million tokens."""
AXES_MAX: Final = 64
"""Axes of an array: what numpy and torch have."""
REGIONS_MAX: Final = 4096
"""Regions a block: K and V of 1,024 layers apart are 2,048."""
TICKETS_MAX: Final = 4096
"""Tickets in flight a client, by default: an engine's largest step has a few hundred."""
TICKETS_LIMIT: Final = 1 << 20
"""What a client may raise its tickets to: each holds about 1 KiB of Python objects."""
CLIENTS_MAX: Final = 1024
"""Clients a store: each holds an eventfd and a queue; engines use one a worker thread."""
NAMESPACES_MAX: Final = 65536
"""Identities and shards a handle has met: each holds about 1 KiB, and its text is in the log."""
LEASES_MAX: Final = 65536
"""Leases at once: each pins segments, and pinned segments can't be reclaimed."""
LEASE_MS_MAX: Final = 60_000
"""A lease's life, by default: longer than any load, and a crashed client's pins end."""

# ---- segments and capacity ----------------------------------------------------------------------
SEGMENT_BYTES_MIN: Final = 4 * MIB
"""Below this, headers and directories take more than 1 % of a segment."""
SEGMENT_BYTES_MAX: Final = 1 * GIB
"""Above this, one reclaim throws away too much at once."""
CAPACITY_BYTES_MAX: Final = 1 << 62
"""Sums of a few such numbers stay within 64 bits."""
SEGMENTS_PER_CAPACITY: Final = 256
"""Segment size aims at capacity/256: reclaiming one costs 0.4 % of the cache."""
SEGMENT_COUNT_MAX: Final = 1 << 20
"""Segment numbers: 1 PiB of 1 GiB segments; the index keeps a row of each."""
SEGMENT_COUNT_MIN: Final = 4
"""One open, one to reclaim, and two that leases may hold, which is half of them."""
RECORDS_PER_SEGMENT_MIN: Final = 4
"""A record is at most a quarter of a segment, so sealing wastes less than that."""
SEALING_SYNC: Final = 3
"""Full segments that one sync makes durable, or fewer of a GiB, where nobody asks for it before."""
SEALING_MAX: Final = 4
"""Full segments without a directory: what an opening after a power cut scans, beside the open one.
"""
WRITE_RUN_BYTES: Final = 1 * MIB
"""Aim of one write: drives reach their bandwidth there, and more only adds latency."""
FREE_FLOOR_BYTES: Final = 256 * MIB
"""Left free on the file system by default: others must never meet ENOSPC because of a cache."""
FREE_FLOOR_FRACTION: Final = 0.01
"""... and at most this share of the file system, so that small ones can be used at all."""

OPEN_FILES_SHARE: Final = 2
"""A store keeps one descriptor a segment: at most one in two of the process' (ulimit -n)."""
OPEN_FILES_SPARE: Final = 16
"""... and besides leaves so many for logs, folders and whatever opens one for a moment."""
LOG_ROOM_BYTES: Final = 64 * KIB
"""Reserved behind each manifest log: some 2,000 kills or 600 reclaimed segments on a full disk."""
NAMESPACE_TEXT_SHARE: Final = 8
"""Readable identities in the log take at most an eighth of metadata's share of the capacity."""

PROFILE_BYTES_MAX: Final = 64 * KIB
"""A calibration profile: four levels of a thousand layers in eight digits each."""

SEQUENCES_UNSEEN: Final = 1 << 32
"""Where a handle goes on behind another's tail it leaves so many sequences out: records that the
other one wrote in vain, and that reach the device after all, have theirs among these. Those of 2^30
such openings are below 2^62."""

UNSURE_DIRECTORIES: Final = 2 * (SEALING_MAX + 1)
"""Newest sealed segments whose directories may not be durable: those that wait for a sync together,
and those that got theirs behind the sync before."""

PROFILES_MAX: Final = 8
"""Profiles that the log keeps; the ones used last stay. Records need none to be read."""

# ---- I/O and memory -----------------------------------------------------------------------------
QUEUE_DEPTH_MAX: Final = 4096
"""Operations at the device at once: NVMe queues hold 1,024 as a rule."""
WORKERS_MAX: Final = 64
"""Threads that code and check: memory bandwidth is gone long before."""
IO_THREADS_MAX: Final = 256
"""Threads of the `threads` backend; each is one operation in flight."""
RETRIES: Final = 16
"""Of one operation on EINTR, EAGAIN and short results: more is a broken device, not bad luck."""
RETRIES_MAX: Final = 1000
"""What the option `retries` may be raised to."""
IO_BYTES_MAX: Final = 1 * MIB
"""Bytes of one submission: larger ones are split by the kernel anyway and hold buffers longer."""
READ_BUFFER_BYTES: Final = 64 * MIB
"""Bounce buffers of all reads: queue depth 64 times 1 MiB."""
STAGING_BYTES: Final = 64 * MIB
"""Encoded records on their way to flash; a put waits or is BUSY beyond."""
INFLIGHT_BYTES: Final = 16 * GIB
"""Of callers' memory in tickets that aren't done: the KV of a long prompt, seconds of a fast drive.
Nothing is allocated for it; what waits behind more would come too late anyway."""
INFLIGHT_BYTES_MAX: Final = 1 << 50
"""What the option may be raised to."""
HEADER_CACHE_BYTES: Final = 64 * MIB
"""Decoded record headers: enough for some 10,000 records."""
BUFFER_BYTES_MIN: Final = 4 * MIB
"""No buffer pool works below one record of the smallest segment and its alignment."""
BUFFER_BYTES_MAX: Final = 64 * GIB
"""A larger buffer is a typing error, not a buffer."""
READ_GAP_BYTES: Final = 64 * KIB
"""Unwanted bytes that one read may cover: cheaper than a second operation."""
READ_AMPLIFICATION: Final = 1.25
"""... while pages read stay below this multiple of pages wanted."""
WRITE_WAIT_MS: Final = 20
"""A get of blocks whose write isn't over waits so long before others of its lane go on ..."""
WRITE_LOOK_MS: Final = 5
"""... and is looked at again every so often."""
BLOOM_BITS_PER_KEY: Final = 10
"""Optional filter in a segment's directory: about 1 % false positives."""
