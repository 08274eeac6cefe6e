"""What is asked of a trace, in SQL: rows that have to be those of `tests.kit.perfetto_truth`."""

from __future__ import annotations


def arg(name: str, of: str = "s") -> str:
    return f"extract_arg({of}.arg_set_id, 'debug.{name}')"


def args(*names: str) -> str:
    return ", ".join(map(arg, names))


def slices(columns: str, where: str) -> str:
    return f"select {columns} from slice s join track t on t.id = s.track_id where {where}"


def counters(columns: str, where: str) -> str:
    return f"select {columns} from counter c join track t on t.id = c.track_id where {where}"


TRACK = "substr(t.name, 1, instr(t.name || ' of context ', ' of context ') - 1)"
"""the name of a track without its context"""
NAME = "substr(s.name, 1, instr(s.name || ' ', ' ') - 1)"
"""the ops of a slice's name, without the role"""
OP = f"{TRACK} = 'layers' and s.category not in ('layer', 'block')"
_VALUE = "coalesce(a.string_value, a.int_value, a.real_value)"
_ARGS = ("op", "layer", "weight", "weight_type", "fused_with", "backend", "buffer",
         "eps", "scale", "n_dims", "freq_base")  # fmt: skip

ROWS = {
    "steps": slices(
        f"s.ts, s.dur, s.name, {args('step', 'tokens', 'status')}", "category = 'step'"
    ),
    "texts": slices("s.ts, s.dur, s.name", "category = 'token'"),
    "phases": slices("s.ts, s.dur, s.name", "category = 'phase'"),
    "loads": slices(f"s.ts, s.dur, {args('model', 'arch', 'params', 'bytes')}", "s.name = 'load'"),
    "marks": slices(f"s.ts, s.dur, s.name, {arg('mark')}", "category = 'mark'"),
    "messages": slices(
        f"s.ts, s.name, coalesce({args('text', 'data')})", "category in ('note', 'message')"
    ),
    "layers": slices("s.ts, s.dur, s.name", "category = 'layer'"),
    "ops": slices(f"s.ts, s.dur, {NAME}, {args('tensor', 'output')}", OP),
    "titles": slices("s.ts, s.name", f"{OP} and {arg('weight')} is not null and {NAME} <> 'ROPE'"),
    "args": f"select s.ts, substr(a.key, 7), {_VALUE} from slice s join track t on"
    f" t.id = s.track_id join args a on a.arg_set_id = s.arg_set_id where {OP} and"
    f" (substr(a.key, 7) in {_ARGS} or a.key glob 'debug.source_*') and not"
    # a parameter that belongs to another op of the same name: SCALE also has a scale
    f" (a.key = 'debug.scale' and {NAME} not in ('SOFT_MAX', 'FLASH_ATTN_EXT'))",
    "work": slices(f"s.ts, {args('flops', 'bytes')}", f"{OP} and {NAME} = 'MUL_MAT'"),
    "threads": slices(
        f"cast(substr(t.name, 8) as int), s.ts, s.dur, {NAME}, {arg('wait_ns')}",
        "t.name glob 'thread [0-9]*' and category <> 'wait'",
    ),
    "splits": slices(f"s.ts, s.dur, s.name, {arg('split')}", "category = 'split'"),
    "syncs": slices("s.ts, s.dur", "s.name = 'synchronize'"),
    "tokens": slices(f"s.ts, s.dur, {args('text', 'id', 'p')}", "s.name = 'sample'"),
    "stats": f"select s.ts, substr(a.key, 7), {_VALUE} from slice s join args a on"
    " a.arg_set_id = s.arg_set_id where s.category = 'stats'",
    "kv": counters("c.ts, cast(c.value as int)", "t.name glob 'KV cells*'"),
    "kv_bytes": counters("c.ts, cast(c.value as int)", "t.name glob 'KV bytes*'"),
    "kv_changes": slices(f"s.ts, s.name, {args('seq', 'seq_dst', 'p0', 'p1', 'arg')}",
                         "s.name glob 'KV *'"),
    "values": "select c.ts, t.name, c.value from counter c join track t on t.id = c.track_id"
    " join track g on g.id = t.parent_id where g.name glob 'tensor statistics*'",
    "memory": f"select c.ts, {TRACK}, cast(c.value as int) from counter c join track t"
    " on t.id = c.track_id join track g on g.id = t.parent_id where g.name glob 'memory*'",
    "machine": counters(f"c.ts, {TRACK}, c.value", "t.name in ('waiting for a CPU', 'load')"),
    "faults": counters("c.ts, cast(c.value as int)", "t.name glob 'minor page faults*'"),
    "major_faults": counters("c.ts, cast(c.value as int)", "t.name glob 'major page faults*'"),
}  # fmt: skip
"""by the name of the truth's field"""

SUMS = {
    "spent": slices(f"{NAME}, sum(s.dur), count(*)", OP) + " group by 1",
    "waits": slices(
        "cast(substr(t.name, 8) as int), sum(s.dur)",
        "s.category = 'wait' and t.name glob 'thread *'",
    )
    + " group by 1",
    "rates": counters("c.ts, c.value", "t.name glob 'tokens/s*' and c.value <> 0"),
    "op_rates": "select s.dur, " + args("bytes", "GB/s", "flops", "GFLOP/s") + " from slice s where"
    f" {arg('output')} is not null and s.dur > 0",
    # of each compute: the sums of its ops' work divided by its time, and what the counters say
    "achieved": "select * from (select p.ts,"
    f" sum({arg('bytes', 'o')}) * 1.0 / p.dur, sum({arg('flops', 'o')}) * 1.0 / p.dur,"
    " (select max(value) from counter c join track t on t.id = c.track_id"
    "  where t.name glob 'achieved GB/s*' and c.ts = p.ts),"
    " (select max(value) from counter c join track t on t.id = c.track_id"
    "  where t.name glob 'achieved GFLOP/s*' and c.ts = p.ts)"
    " from slice p join slice o on p.ts <= o.ts and o.ts < p.ts + p.dur join track l"
    " on l.id = o.track_id where p.category = 'phase' and p.name = 'compute'"
    " and l.name glob 'layers*'"
    " and o.category not in ('layer', 'block') group by p.id)",
    "n_flows": "select count(*) from flow",
    "token_flows": "select count(*) from flow f join slice a on a.id = f.slice_out"
    " join slice b on b.id = f.slice_in where a.name = 'sample' and b.name = 'decode'",
    "clock": "select ts, to_realtime(ts) from slice where category = 'step'",
}

WRONG = {
    "a flow that leads back": "select a.name, b.name from flow f join slice a"
    " on a.id = f.slice_out join slice b on b.id = f.slice_in"
    " where a.ts + a.dur > b.ts and a.track_id = b.track_id",
    "a child that begins before its parent, or ends after it": "select c.name from slice c"
    " join slice p on p.id = c.parent_id where c.ts < p.ts or c.ts + c.dur > p.ts + p.dur",
    "an op in no block, a block in no layer, a block of another layer": "select c.name from slice c"
    " join track t on t.id = c.track_id"
    " left join slice p on p.id = c.parent_id where t.name glob 'layers*' and"
    " case c.category when 'layer' then p.id is not null"
    f" when 'block' then p.category is not 'layer' or {arg('layer', 'p')} <> {arg('layer', 'c')}"
    " else p.category is not 'block' or p.name <> c.category end",
    "a layer in no compute": "select l.name from slice l where l.category = 'layer' and not exists"
    " (select 1 from slice s where s.category = 'phase' and s.name = 'compute'"
    " and s.ts <= l.ts and l.ts + l.dur <= s.ts + s.dur)",
    "a compute in no step": "select l.name from slice l where l.category = 'phase' and not exists"
    " (select 1 from slice s where s.category = 'step' and s.ts <= l.ts"
    " and l.ts + l.dur <= s.ts + s.dur)",
    "slices of one depth that overlap": "select a.name from slice a join slice b"
    " on a.track_id = b.track_id and a.depth = b.depth"
    " and a.id < b.id where a.ts < b.ts and b.ts < a.ts + a.dur",
    "a rate that stays when nothing runs": "select t.name from counter c join track t"
    " on t.id = c.track_id where t.name glob 'achieved*' or t.name glob 'tokens/s*'"
    " or t.name glob '* page faults*' or t.name in ('waiting for a CPU', 'load')"
    " group by t.id having (select value from counter l"
    "  where l.track_id = t.id order by l.ts desc, l.id desc limit 1) <> 0",
    "two tracks of contexts with one name": "select t.name from track t join track g"
    " on g.id = t.parent_id where t.name not in ('marks', 'messages') and g.name <> 'marks'"
    " group by t.name having count(distinct t.parent_id) > 1",
}
"""what must not occur"""

TRACKS = (
    "select t.name from track t join track p on p.id = t.parent_id where p.name = 'session'"
    " group by t.name order by min(cast(coalesce("
    "extract_arg(t.source_arg_set_id, 'sibling_order_rank'), 0) as int))"
)
HOW_ORDERED = (
    "select extract_arg(source_arg_set_id, 'child_ordering') from track where name = 'session'"
)
