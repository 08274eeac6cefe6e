"""The schema of the log's events, version 1: every event name, key, unit and meaning.

The schema is a msgspec tagged union, which decodes and validates events. `python -m tools.generate`
generates the header of the C++ writer (`llama-instrumentation-schema.h` in `patches/src/src`) and
`docs/reference/log-format.md` from it. A test fails if either is out of date.

Conventions: Times are integer nanoseconds. `t` is CLOCK_MONOTONIC. Sizes are bytes. Layer -1 means
that an op or a tensor belongs to no layer. Durations, counts and sizes are at least 0 and below
2**53, so every JSON reader keeps them exactly. `t` is below 2**62 (146 years). Ids (`model`, `ctx`,
`graph`, `plan`, `step`, `compute`) count from 0 through all parts of a log and are below 2**31. All
columns of an event have the same length. In `gap`/`dur` columns the i-th interval begins at
`t + sum(gap[:i+1]) + sum(dur[:i])`. gap[0] is 0, and an absent `gap` means all zeros. `connection`
counts all connections of the process, including those made while nothing was recorded.

Lifetimes: An event assigns an id once, before any other event names it. A reader keeps models
until the log ends. It may forget a context once 256 others have been named after it, and a graph
and its plans once 64 other graphs of that context have been written or computed; if the recorder
meets an older graph again, it writes it again with a new id. `experts`, `layers`, `ops`, `splits`
and `tensor_stats` name the latest compute of a context; `ops` of a device may name one of the 64
latest computes, of all contexts, with a split of a backend other than the CPU. `compute` and
`step_end` name an open step, but `kv` and `token` may name one that has ended. `rpc` may name steps
and computes that end in later lines, or never. So a reader needs the same memory for a log of any
size. Commands reject a log that names anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

SCHEMA_VERSION = 1
FIRST_BYTES = b'{"event":"session_start"'
"""the first bytes of every log"""
MAX_LINE = 16 << 20
"""in bytes. The longest line of a real log is a graph at verbose. It has about 90 bytes per node:
350 kB for 126 layers. A decoded line can take 25 times its bytes."""

Level = Literal["minimal", "detailed", "verbose"]
LEVELS: tuple[Level, ...] = ("minimal", "detailed", "verbose")

CONTEXTS_KEPT = 256
GRAPHS_KEPT = 64
"""of a context, with their plans; the recorder keeps as many (`llama-instrumentation-graph.h`)"""

WEIGHTS_KEPT = 16_384
"""of a model, which a graph may give by their ids; the recorder gives others whole
(`llama-instrumentation-graph.h`)"""

MAX_SEQUENCES = 256
"""of a context (llama.cpp's LLAMA_MAX_SEQ)"""

MAX_EXPERTS = 4096
"""of a node; llama.cpp allows 1024"""

RPC_COMMANDS = (
    "ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "BUFFER_GET_BASE", "FREE_BUFFER",
    "BUFFER_CLEAR", "SET_TENSOR", "SET_TENSOR_HASH", "GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE",
    "GET_DEVICE_MEMORY", "INIT_TENSOR", "GET_ALLOC_SIZE", "HELLO", "DEVICE_COUNT",
    "GRAPH_RECOMPUTE", "MEMSET_TENSOR",
)  # fmt: skip
"""of ggml's RPC protocol, version 7, in the order of their codes (`rpc_cmd` in `ggml-rpc.cpp`)"""

MOST = 2**53 - 1
"""the largest duration, count or size; durations of 104 days, sizes of 8 PiB"""
LATEST = 2**62 - 1
"""the latest time; its sum with a duration still fits into 64 bits"""

Ns = Annotated[int, Meta(ge=0, le=MOST, description="nanoseconds")]
TotalNs = Annotated[int, Meta(ge=0, le=LATEST, description="nanoseconds")]
Time = Annotated[int, Meta(ge=0, le=LATEST, description="nanoseconds of CLOCK_MONOTONIC")]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Bytes = Annotated[int, Meta(ge=0, le=MOST, description="bytes")]
Ref = Annotated[int, Meta(ge=0, le=2**31 - 1, description="an id that an earlier event assigned")]
OptionalRef = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""-1 for none"""
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Layer = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
OptionalNs = Annotated[int, Meta(ge=-1, le=MOST, description="nanoseconds")]
"""-1 for none"""
Offset = Annotated[int, Meta(ge=-LATEST, le=LATEST, description="nanoseconds")]
Truth = Annotated[int, Meta(ge=0, le=1)]
Fused = Annotated[int, Meta(ge=1, le=1000)]
"""nodes of one kernel; ggml fuses a few dozen"""
Shape = Annotated[list[Count], Meta(max_length=4)]
Sources = Annotated[list[Int32], Meta(max_length=64)]
"""ggml allows 10"""
Strides = Annotated[list[Bytes], Meta(max_length=4)]
Sequences = Annotated[list[Int32], Meta(max_length=MAX_SEQUENCES)]
Int32Words = Annotated[list[Int32], Meta(max_length=64)]
"""ggml allows 16"""
RpcCommand = Annotated[int, Meta(ge=0, le=len(RPC_COMMANDS) - 1)]
Expert = Annotated[int, Meta(ge=0, le=MAX_EXPERTS - 1)]
Uses = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=1000)]
"""the name of a tensor, an op or a type; ggml allows 63 bytes"""
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Event(
    Struct,
    tag_field="event",
    tag=lambda name: "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_"),
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
):
    """The base of all events."""

    t: Time


# --- the session -----------------------------------------------------------------------------


class Producer(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Who wrote the log."""

    llama_cpp: str
    """llama-cpp-python's version, local part included"""
    commit: str
    """commit of the vendored llama.cpp"""
    patches: str
    """digest of the patch set"""
    abi: Int32
    """version of the recorder's C API"""


class Host(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The machine that the process ran on."""

    cpu: str
    features: list[str]
    """instruction sets that the loaded ggml uses"""
    cores: Count
    """logical processors online"""
    memory: Bytes
    os: str


class Process(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The recorded process."""

    pid: Int32
    argv: list[str]


class SessionStart(Event, kw_only=True):
    """The first line of every log. `t` and `wall` are the same moment."""

    schema: Int32
    id: str
    """random, 16 hexadecimal digits; the same in all parts of a rotated log"""
    part: Annotated[int, Meta(ge=1)] = 1
    """number of the file in a rotated log (`instr exec --rotate`). Each file is a complete log that
    repeats models, contexts and graphs. Ids keep counting: models and contexts keep theirs, graphs
    get new ones"""
    time: str
    """`wall` as ISO 8601, UTC"""
    wall: Annotated[int, Meta(ge=0, le=LATEST, description="nanoseconds since 1970-01-01 UTC")]
    level: Level
    clock: Literal["tsc", "cntvct", "monotonic"]
    """the clock that times ops; its times are always converted to CLOCK_MONOTONIC"""
    tick: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """ns of one tick of that clock, if the processor states it (arm64). A time is a whole number
    of ticks"""
    perturbed: bool = False
    """tensor values were read (`--stats`), or a debugger could stop computes and change values:
    kernels may differ, so do not compare times"""
    producer: Producer
    host: Host
    process: Process
    args: dict[str, Any] = {}
    """the options of the recording program"""


class SessionEnd(Event, kw_only=True):
    """The last line of a closed log. If it is missing, the log was not closed."""

    reason: Literal["closed", "exit", "rotated"]
    """`closed`: by the program; `exit`: the process ended; `rotated`: the next part continues"""
    events: dict[str, Count]
    """number of lines before this one, by event"""
    bytes: Bytes
    """bytes written before this line"""
    dropped: Count
    """events that could not be written (disk full, pipe closed or not read), and steps under way"""
    dropped_ops: Count
    """ops that did not fit into the buffer of a thread, and ops of devices without a result"""
    decode_ns: TotalNs
    """time in decode and encode, the sum over all contexts"""
    overhead_ns: TotalNs
    """time that the recorder spent inside steps and sampling, and in its own thread, which formats
    and writes. It does not include reading the clock once per op"""


class Machine(Event, kw_only=True):
    """What else the machine did. Written at most ten times a second, and only while there are
    steps. It covers the time since the previous `machine` event, or since the session began, and
    the whole process, not one step."""

    dur: Ns
    """time that it covers; it ends at `t`"""
    cpu: Ns
    """CPU time of the process, user and system, all threads"""
    delay: Ns | None = None
    """time in which threads of the process were ready to run but waited for a CPU, the sum over all
    threads. Absent if the system does not report it"""
    nvcsw: Count
    """voluntary context switches: a thread waited for something"""
    nivcsw: Count
    """involuntary context switches: another thread got the CPU"""
    load: float | None = None
    """load average of the machine over one minute. Absent if the system does not report it, like
    the next three"""
    running: Count | None = None
    """threads of the whole machine that run or are ready to run at `t`, without the one that reads
    this"""
    busy: Ns | None = None
    """CPU time of the whole machine, all processes and all CPUs. The system counts it in ticks,
    often of 10 milliseconds"""
    steal: Ns | None = None
    """CPU time of this machine that its hypervisor gave to others, all CPUs"""


class Mark(Event, kw_only=True):
    """A span or an instant that the application named."""

    mark: Count
    """pairs `begin` with `end`"""
    name: str
    phase: Literal["begin", "end", "instant"]
    thread: Int32 = 0
    """operating system's thread id"""
    seq: OptionalRef = -1
    """the sequence that served the span, if that is a request; -1 if the application did not name
    one. It may be named only at the end: a request arrives before a sequence is free"""


class Note(Event, kw_only=True):
    """An event that the application added. The application defines its content."""

    name: str
    data: Any


class Message(Event, kw_only=True):
    """A warning or an error of llama.cpp or of the recorder."""

    level: Literal["warn", "error"]
    text: str


# --- static facts -----------------------------------------------------------------------------


class Model(Event, kw_only=True):
    """A model was loaded. `t` is when loading began."""

    model: Ref
    path: str
    arch: str
    name: str = ""
    description: str = ""
    """llama.cpp's description: architecture, size class, file type"""
    params: Count
    bytes: Bytes
    """of all weights"""
    ftype: str
    hparams: dict[str, Number | float | str]
    dur: Ns
    """of loading"""
    n_tensors: Count
    dry: bool = False
    """loaded without its weights, to measure what it needs; no user asked for it"""


class Tensor(Event, kw_only=True):
    """A weight."""

    model: Ref
    tensor: Ref
    """counts from 0 within the model"""
    name: Name
    type: Name
    """the storage type, in ggml's words"""
    ne: Shape
    """in ggml's order: the length of a row first"""
    bytes: Bytes
    buffer: str
    """buffer type, which determines the kernels (CPU_Mapped, CPU_REPACK, AMX)"""
    layer: Layer = -1


class Context(Event, kw_only=True):
    """A context was created."""

    ctx: Ref
    model: Ref
    target: OptionalRef = -1
    """the context that verifies the tokens that this one drafts, -1 if it drafts none"""
    n_ctx: Count
    n_ctx_seq: Count
    n_batch: Count
    n_ubatch: Count
    n_seq_max: Count
    n_threads: Count
    n_threads_batch: Count
    type_k: str
    type_v: str
    flash_attn: bool
    causal: bool
    embeddings: bool
    kv_unified: bool
    offload_kqv: bool
    backends: list[str]


class BufferUse(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Bytes that a context holds in one buffer type."""

    buffer: str
    device: Name = ""
    """the device whose memory they take; absent for the machine's"""
    model: Bytes = 0
    context: Bytes = 0
    """KV cache or recurrent state"""
    compute: Bytes = 0


def is_of_machine(buffer: str) -> bool:
    """Whether a buffer of this name is in the machine's own memory: a device may have some there,
    which it has pinned."""
    return buffer.startswith(("CPU", "AMX")) or buffer.endswith("_Host")


class DeviceMemory(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The memory of a device, as its driver reports it."""

    device: Name
    total: Bytes
    free: Bytes
    """when this was written, so without what the context holds. Some drivers report the total"""


class Memory(Event, kw_only=True):
    """llama.cpp's memory breakdown. Written when a context is created and when it changes."""

    ctx: Ref
    buffers: list[BufferUse]
    devices: list[DeviceMemory] = []
    """that the context may use"""
    rss: Bytes = 0
    """resident memory of the whole process"""


class Adapter(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True):
    """A LoRA adapter. It adds `scale` times B A x to the product of a weight with x, times `alpha`
    / `rank` if it has an alpha."""

    file: str = ""
    """its name without directories; empty if the application did not name one"""
    name: str = ""
    """from its metadata"""
    rank: Count
    """the largest of its pairs"""
    n_weights: Count
    """weights of the model that it changes"""
    bytes: Bytes
    """of its matrices A and B"""
    alpha: float = 0.0
    """0 if its file has none"""
    scale: float | None = None
    """the factor that the application chose; absent if it is not a finite number"""


class Adapters(Event, kw_only=True):
    """The LoRA adapters that a context uses from now on.

    Written when they change, so a context that never used any has no such event. An adapter whose
    scale is 0 is not used, and is left out.
    """

    ctx: Ref
    adapters: list[Adapter]


class Leaf(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A tensor that a graph reads but does not compute: a weight, an input, a cache. A weight may
    have only `tensor`, an id below 16,384; the rest is as in that `tensor` event of the context's
    model."""

    name: Name = ""
    type: Name = ""
    ne: Shape = []
    bytes: Bytes = 0
    buffer: Name = ""
    tensor: OptionalRef = -1
    """the id of the weight, -1 if it is not a weight"""


class Split(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A run of nodes that the scheduler assigns to one backend."""

    start: Count
    """first node"""
    end: Count
    """one past the last node"""
    backend: Name


class Nodes(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The nodes of a graph as columns. Node i is the i-th entry of each column. Columns that are in
    the graph's `changes` are absent."""

    name: list[Name]
    """not unique in a graph"""
    op: list[Name] = []
    layer: list[Layer]
    type: list[Name] = []
    ne: list[Shape] = []
    """in ggml's order, without trailing 1s"""
    bytes: list[Bytes] = []
    src: list[Sources]
    """n >= 0 means node n, n < 0 means leaf -1-n"""
    buffer: list[OptionalRef]
    """index into the graph's `buffers`, -1 for none"""
    params: list[Int32Words] = []
    """the op's parameters as ggml stores them, without trailing zeros"""
    exec: list[Truth]
    """1 if a kernel runs for the node; 0 for views and nodes without the compute flag"""
    nb: list[Strides] | None = None
    """strides in bytes (verbose)"""


class CodedNumbers(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A column in which few values repeat: entry i is `values[at[i]]`. The values are in the order
    in which they first occur."""

    values: list[Bytes]
    at: list[Count] | None = None
    """absent, only with `like`: entries are equal where those of the other graph's column are"""


class CodedShapes(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The same for a column of shapes or strides."""

    values: list[Shape]
    at: list[Count] | None = None


class CodedWords(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The same for a column of parameters."""

    values: list[Int32Words]
    at: list[Count] | None = None


class CodedNames(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The same for a column of names."""

    values: list[Name]
    at: list[Count] | None = None


class Changes(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Columns of nodes: those in which a graph differs from the graph `like`, or, for a graph
    without `like`, those that `nodes` lacks."""

    op: CodedNames | None = None
    type: CodedNames | None = None
    ne: CodedShapes | None = None
    bytes: CodedNumbers | None = None
    params: CodedWords | None = None
    nb: CodedShapes | None = None


class Graph(Event, kw_only=True):
    """A graph was built and allocated. It can be computed any number of times.

    A graph that llama.cpp builds again is written only if its content is new. One that differs from
    an earlier graph of its context only in shapes has `like` in place of `buffers` and `nodes`.
    """

    graph: Ref
    ctx: OptionalRef
    """-1 for a graph that a client of an RPC server sent: graphs without a context are kept as if
    they were all of one context"""
    uid: Count
    """ggml's id of the graph in the process"""
    source: Literal["decode", "encode", "memory_update", "reserve", "rpc"]
    """`reserve`: for a dry run, neither allocated nor computed. `rpc`: sent by a client"""
    why: Literal["first", "changed", "memory_update"]
    """`changed`: its parameters (tokens, outputs, cache size) prevented the reuse of the previous
    graph"""
    n_nodes: Count
    n_exec: Count
    """nodes for which a kernel runs"""
    splits: list[Split]
    buffers: list[Name] = []
    leafs: list[Leaf] = []
    nodes: Nodes | None = None
    """absent at `minimal`"""
    like: Ref | None = None
    """the graph that it equals, except for `splits`, `leafs` and `changes`"""
    leafs_at: list[Count] = []
    """with `like`: the places of `leafs` among those of the other graph"""
    changes: Changes | None = None

    @property
    def whole(self) -> Nodes:
        """`nodes` of a graph that must have them."""
        assert self.nodes is not None
        return self.nodes

    def leaf(self, source: int) -> Leaf:
        """The leaf that a node reads as `source`, a negative number."""
        return self.leafs[-1 - source]


class Plan(Event, kw_only=True):
    """The order in which the kernels of a graph run. `ops` events refer to it."""

    plan: Ref
    graph: Ref
    node: list[Count] = []
    """first node that the kernel computes"""
    n: list[Fused] | None = None
    """number of nodes that it computes, more than 1 if fused. Absent: all 1"""
    like: Ref | None = None
    """the plan whose `node` and `n` it shares; the graphs of both are alike"""

    @property
    def counts(self) -> list[int]:
        """`n`, even if it is absent."""
        return self.n or [1] * len(self.node)

    @property
    def kernels(self) -> list[range]:
        """The nodes that each kernel computes."""
        columns = zip(self.node, self.counts, strict=True)
        return [range(first, first + n) for first, n in columns]


# --- measurements -----------------------------------------------------------------------------


class StepBegin(Event, kw_only=True):
    """A call of `llama_decode` or `llama_encode` begins."""

    step: Ref
    ctx: Ref
    kind: Literal["decode", "encode"]
    phase: Literal["prefill", "decode"]
    """`decode` if every sequence has at most one token in the batch. Reports and traces know more:
    to them a prompt of one token is a prefill, and verifying drafted tokens is a decode"""
    n_tokens: Count
    n_outputs: Count
    n_seqs: Count
    pos: Int32 = -1
    """smallest position in the batch, -1 if llama.cpp chooses it"""
    thread: Int32 = 0
    """operating system's thread id of the caller"""
    seq: Sequences | None = None
    """the sequences that have tokens in the batch, as columns with the next three"""
    seq_pos: Sequences | None = None
    """the first position of each, which is the number of its tokens that were computed before"""
    seq_tokens: Sequences | None = None
    """the number of tokens of each; absent if all are 1"""
    seq_outputs: Sequences | None = None
    """the number of outputs of each; absent if all are 1"""

    @property
    def sequences(self) -> list[tuple[int, int, int, int]]:
        """The sequence, first position, number of tokens and of outputs of each sequence in the
        batch; empty in logs that do not have them, and if the columns differ in length."""
        seq = self.seq or []
        ones = [1] * len(seq)
        columns = (seq, self.seq_pos or [], self.seq_tokens or ones, self.seq_outputs or ones)
        try:
            return list(zip(*columns, strict=True))
        except ValueError:
            return []


class StepEnd(Event, kw_only=True):
    """The call returned."""

    step: Ref
    status: Int32
    """its return value; 0 is success"""
    n_ubatch: Count
    n_reused: Count
    """ubatches that reused the previous graph"""
    prepare: Ns
    """from the start of the step to the first ubatch: batch checks, cache slots, output buffers"""
    readback: Ns
    """copying out logits and embeddings after a ubatch"""
    recorder: Ns = 0
    """time that the recorder itself took; no other span of the step includes it"""
    minflt: Count = 0
    """minor page faults of the process since the recorder last read the count (or the session
    began). The recorder reads it at the first step and then at most every 100 milliseconds, because
    the call is slow. Absent if the recorder did not read it or there were none"""
    majflt: Count = 0
    """major page faults of the process in the same time; a cold start reads the model's file"""


class Compute(Event, kw_only=True):
    """One graph compute. From `t`: apply, build, alloc, inputs; then the compute, at `start`."""

    compute: Ref
    graph: Ref
    ctx: OptionalRef
    """-1 for a compute that a client of an RPC server asked for"""
    step: OptionalRef = -1
    """-1 outside a step"""
    source: Literal["decode", "encode", "memory_update", "rpc"]
    reused: bool
    """`rpc`: the client asked for the graph that the server computed before (`GRAPH_RECOMPUTE`)"""
    n_tokens: Count = 0
    n_threads: Count
    apply: Ns = 0
    """taking slots of the memory (KV cache)"""
    build: Ns = 0
    alloc: Ns = 0
    inputs: Ns = 0
    start: Ns = 0
    """offset of the compute from `t`"""
    dur: Ns
    """of the compute; on asynchronous backends, until its submission"""
    status: Int32 = 0


class Experts(Event, kw_only=True):
    """The experts that one graph compute used, if its graph chooses among experts on the CPU."""

    compute: Ref
    node: list[Count]
    """the first `MUL_MAT_ID` that reads the ids of the chosen experts; others that read the same
    ids use the same experts"""
    expert: list[list[Expert]]
    """for each node: the experts that were used, ascending"""
    uses: list[list[Uses]] | None = None
    """for each of these experts: how many tokens used it. Absent: all 1"""

    def choices(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """The node, the experts and their uses of each node."""
        uses = self.uses or [[1] * len(expert) for expert in self.expert]
        return zip(self.node, self.expert, uses, strict=False)


class Layers(Event, kw_only=True):
    """The layers of one graph compute: consecutive kernels of the same layer, on thread 0."""

    compute: Ref
    layer: list[Layer]
    gap: list[Ns] | None = None
    dur: list[Ns]


class Ops(Event, kw_only=True):
    """The kernels of one graph compute on one thread, or of one of its splits on a device that
    computes behind the caller, in the order of `plan`.

    Those of a device are on the clock of the log as its `device` event describes. They may come
    after the end of their step, even in a later part of the log.
    """

    compute: Ref
    plan: Ref
    thread: Count = 0
    """ggml's thread number; 0 is the caller"""
    device: Name = ""
    """the backend of the split; absent for the kernels of a thread"""
    split: OptionalRef = -1
    """with `device`: index into the graph's `splits`"""
    gap: list[Ns] | None = None
    """time before the kernel: the barrier after the previous one"""
    dur: list[Ns]
    wait: list[Ns] | None = None
    """the part of `dur` spent in barriers (verbose)"""
    tail: Ns = 0
    """time after the last kernel: the barrier until all threads are done"""


class Device(Event, kw_only=True):
    """A device whose kernels are timed. Written before its first `ops`, and again when its
    `uncertainty` grows."""

    name: Name
    """of its backend, as in a graph's `splits`"""
    description: Name
    clock: Literal["calibrated", "bounded", "cupti", "joined"]
    """how its clock is joined with the log's: by the driver's calibration, by the submission and
    the end of the wait, by CUPTI, or by the commands of a connection (`instr merge`)"""
    tick: float
    """ns of one tick of the device's clock"""
    uncertainty: Ns
    """by how much its times may be off on the log's clock"""


class Splits(Event, kw_only=True):
    """The splits of one graph compute, if there are several or a device is involved."""

    compute: Ref
    split: list[Count]
    """index into the graph's `splits`"""
    gap: list[Ns] | None = None
    """input copies and synchronization before the split"""
    dur: list[Ns]
    asynchronous: list[Truth]
    """1 if `dur` ends with the submission to a device, not with its computation"""


class Sync(Event, kw_only=True):
    """A wait for asynchronous backends. It begins at `t`."""

    ctx: Ref
    dur: Ns


class Connection(Event, kw_only=True):
    """A connection of ggml's RPC backend that has this process at one end. Written before its first
    `rpc` in each part of a log. `t` is when its HELLO was answered, or, in a part without its
    HELLO, when its first command in that part began."""

    connection: Ref
    side: Literal["client", "server"]
    """of this process"""
    local: Name
    """address and port of this end"""
    peer: Name
    """address and port of the other end. Two logs have the same connection if these two are
    exchanged, unless something between them translates addresses"""
    endpoint: Name = ""
    """for a client: the server as its user named it. A graph's `splits` name the devices of this
    server `RPCn[endpoint]`, where n counts them on the server"""
    id: Name | None = None
    """of the server's log, if `instr merge` has joined it with this one, like the next four"""
    host: Host | None = None
    """of the server"""
    offset: Offset | None = None
    """the server's clock minus the log's, when the connection begins"""
    drift: float | None = None
    """how much faster the server's clock runs; 0.00004 is 40 ppm"""
    uncertainty: Ns | None = None
    """the most by which a time of the server may be off on the log's clock"""


class Rpc(Event, kw_only=True):
    """Commands on a connection, in their order on the wire, which is the same at both ends. Their
    numbers are not sent: each end counts the commands.

    The i-th command begins at `t` plus the earlier gaps and its own, and plus the durations of the
    earlier commands: `send` and `wait` of a client; `receive`, `work` and `answer` of a server.
    """

    connection: Ref
    first: Count
    """number of the first of these commands on the connection; HELLO is 0"""
    command: list[RpcCommand]
    """codes of ggml's protocol: 6 SET_TENSOR, 8 GET_TENSOR, 9 COPY_TENSOR, 10 GRAPH_COMPUTE,
    14 HELLO, 16 GRAPH_RECOMPUTE; `schema.RPC_COMMANDS` has all"""
    request: list[Bytes]
    """bytes on the wire, with the command and the size"""
    reply: list[Bytes]
    """bytes on the wire, with the size; 0 if the command has no reply"""
    gap: list[Ns]
    """since the end of the previous command"""
    queue: list[Ns] | None = None
    """client: time in the queue of the connection before the command began"""
    send: list[Ns] | None = None
    """client: time until the system had taken the request"""
    wait: list[Ns] | None = None
    """client: time from then until the reply was complete; 0 if there is none"""
    receive: list[Ns] | None = None
    """server: time from the first byte of the request until it was complete"""
    work: list[Ns] | None = None
    """server: time from then until the command was done and a reply could be sent"""
    answer: list[Ns] | None = None
    """server: time until the system had taken the reply; 0 if there is none"""
    step: list[OptionalRef] | None = None
    """client: the step that queued the command, -1 for none. Absent: all -1"""
    compute: list[OptionalRef] | None = None
    """client: the compute that queued the command; server: the compute in this log that the command
    asked for. Absent: all -1"""
    split: list[OptionalRef] | None = None
    """client: index into the `splits` of the compute's graph: the split that this command computes,
    or for which it copies an input. Absent: all -1"""
    arrive: list[Offset | None] | None = None
    """client, in a log merged with the server's: time from the start of the command until its first
    byte arrived at the server; null if the server's log lacks it. May be below 0, within
    `uncertainty`. `receive`, `work`, `answer` and the next two are then the server's"""
    start: list[OptionalNs] | None = None
    """time from when the command was complete until the graph compute it asked for, -1 for none"""
    run: list[OptionalNs] | None = None
    """duration of that graph compute, -1 for none"""


class ConnectionEnd(Event, kw_only=True):
    """A connection ended. Absent if the session ended first."""

    connection: Ref
    reason: Literal["closed", "peer", "failed"]
    """`closed`: by this process; `peer`: by the other one, between two commands; `failed`: during a
    command, because the other end was gone or the command could not be carried out"""
    commands: Count
    """that were completed, including those that are in no `rpc`"""


class Kv(Event, kw_only=True):
    """The memory (KV cache or recurrent state) of a context changed."""

    ctx: Ref
    step: OptionalRef = -1
    cache: Count = 0
    """index of the cache; models with sliding windows or hybrid memory have several"""
    kind: Literal["kv", "recurrent"] = "kv"
    op: Literal["apply", "shift", "clear", "seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div"]
    used: Count
    """cells in use afterwards, the sum over all streams"""
    size: Count
    """cells in total"""
    bytes: Bytes = 0
    """of the cells in use"""
    n_kv: Count = 0
    """cells that attention reads in this ubatch"""
    seq: Int32 | None = None
    seq_dst: Int32 | None = None
    p0: Int32 | None = None
    p1: Int32 | None = None
    arg: Int32 | None = None
    """delta of `seq_add`, divisor of `seq_div`"""
    cells: list[Count] | None = None
    """cells written by this ubatch (verbose)"""


class Token(Event, kw_only=True):
    """A token was sampled. `t` is when the sampler began."""

    ctx: Ref
    step: OptionalRef = -1
    """the step whose logits were sampled"""
    seq: OptionalRef = -1
    """the sequence whose logits were sampled, -1 if unknown"""
    index: Count
    """counts the context's sampled tokens"""
    id: Int32
    text: str
    """bytes that are not UTF-8 are replaced; `hex` then has all bytes of the token"""
    hex: str | None = None
    p: float | None = None
    """probability, if the sampler chain computed one"""
    dur: Ns
    """time in the sampler"""


class TensorStats(Event, kw_only=True):
    """Statistics of the values of one node in one compute (`--stats`)."""

    compute: Ref
    graph: Ref
    node: Ref
    name: str
    layer: Layer = -1
    n: Count
    """number of elements"""
    min: float | None = None
    """of finite elements; absent if there are none"""
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    """population standard deviation"""
    nan: Count
    inf: Count
    zero: Count
    hist: list[Count]
    """finite elements in equal bins from `min` to `max`"""


AnyEvent = (
    SessionStart | SessionEnd | Machine | Mark | Note | Message
    | Model | Tensor | Context | Memory | Adapters | Graph | Plan
    | StepBegin | StepEnd | Compute | Experts | Layers | Device | Ops | Splits | Sync
    | Connection | Rpc | ConnectionEnd | Kv | Token | TensorStats
)  # fmt: skip

EVENTS: tuple[type[Event], ...] = AnyEvent.__args__
"""All event types, in the order of the documentation."""


def event_name(event: Event | type[Event]) -> str:
    """The value of an event's `event` key."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
