/* copy.c: how a block in the caller's memory and its stored (raw) form map onto each other.
 *
 * Invariants: runs are emitted in ascending stored offset, never overlap, and neighbours that are
 * contiguous on both sides come as one run, so that a block in the caller's own order is a single
 * copy.
 */
#include "record.h"
#include <string.h>

typedef struct {
    const fkv_runs *runs;
    const uint64_t *pointers;
    fkv_run_fn emit;
    void *context;
    uint64_t stored, length; /* the run that grows */
    uint8_t *memory;
    uint32_t entry_first[FKV_PLANES_MAX];
    uint32_t counts[4]; /* of the axes, the largest over the planes */
    bool heads_in_order;
} walk;

/* memcpy of a constant size is one move, wherever the elements lie. */
#define EACH_ELEMENT(bytes, to, from)                                                              \
    for (uint64_t i = 0, count = plane->vector_bytes / (bytes); i < count; i++)                    \
    memcpy((to), (from), (bytes))

void fkv_vector_gather(const fkv_plane_row *plane, uint32_t stride, const uint8_t *from,
                       uint8_t *to)
{
    uint32_t bytes = fkv_element_bytes(plane);
    if (bytes == 4)
        EACH_ELEMENT(4, to + 4 * i, from + i * stride);
    else if (bytes == 2)
        EACH_ELEMENT(2, to + 2 * i, from + i * stride);
    else
        EACH_ELEMENT(1, to + i, from + i * stride);
}

void fkv_vector_scatter(const fkv_plane_row *plane, uint32_t stride, const uint8_t *from,
                        uint8_t *to)
{
    uint32_t bytes = fkv_element_bytes(plane);
    if (bytes == 4)
        EACH_ELEMENT(4, to + i * stride, from + 4 * i);
    else if (bytes == 2)
        EACH_ELEMENT(2, to + i * stride, from + 2 * i);
    else
        EACH_ELEMENT(1, to + i * stride, from + i);
}
#undef EACH_ELEMENT

static void walk_emit(walk *w, uint64_t stored, uint64_t address, uint64_t length)
{
    uint8_t *memory = (uint8_t *)(uintptr_t)address;
    if (w->length && w->stored + w->length == stored && w->memory + w->length == memory) {
        w->length += length;
        return;
    }
    if (w->length) w->emit(w->context, w->stored, w->memory, w->length);
    w->stored = stored, w->memory = memory, w->length = length;
}

static bool walk_heads_in_order(const fkv_view *view, uint32_t heads)
{
    if (!view->head_slots) return true;
    for (uint32_t i = 0; i < heads; i++)
        if (view->head_slots[i] != (int32_t)i) return false;
    return true;
}

/* One or, where the innermost axis is contiguous on both sides, all vectors along it. */
static uint32_t walk_vectors(walk *w, const uint32_t index[4], uint32_t inner)
{
    const fkv_runs *r = w->runs;
    uint32_t plane = index[FKV_AXIS_PLANE], layer = index[FKV_AXIS_LAYER],
             head = index[FKV_AXIS_HEAD];
    const fkv_plane_row *row = &r->geometry->planes[plane];
    if (layer >= row->layers || head >= row->heads)
        return inner == FKV_AXIS_TOKEN ? r->token_count : 1;
    uint32_t entry = w->entry_first[plane] + layer, token = index[FKV_AXIS_TOKEN], vectors = 1;
    const fkv_place_in_memory *from = &r->stored[entry], *to = &r->view->entries[entry];
    int64_t bytes = row->vector_bytes;
    uint64_t address = fkv_vector(r->view, w->pointers, entry, head, token);
    if (!address) return inner == FKV_AXIS_TOKEN ? r->token_count - token : 1;
    uint64_t stored = (uint64_t)(from->offset + (int64_t)head * from->head_stride
                                 + (int64_t)(token + r->first_token) * from->token_stride);
    if (to->element_stride) {
        uint32_t step = fkv_element_bytes(row);
        for (uint32_t at = 0; at < row->vector_bytes; at += step, address += to->element_stride)
            walk_emit(w, stored + at, address, step);
        return 1;
    }
    if (inner == FKV_AXIS_TOKEN && from->token_stride == bytes && to->token_stride == bytes)
        vectors = fkv_piece_end(r->view, token, r->token_count) - token;
    else if (inner == FKV_AXIS_HEAD && from->head_stride == bytes && to->head_stride == bytes
             && w->heads_in_order)
        vectors = row->heads - head;
    walk_emit(w, stored, address, (uint64_t)bytes * vectors);
    return vectors;
}

/* The first place from `at` on along an axis where something is wanted. */
static uint32_t walk_next(const walk *w, uint32_t axis, uint32_t at)
{
    const fkv_view *view = w->runs->view;
    const fkv_geometry *g = w->runs->geometry;
    for (; at < w->counts[axis]; at++) {
        if (axis == FKV_AXIS_HEAD && view->head_slots && view->head_slots[at] < 0) continue;
        if (axis != FKV_AXIS_LAYER) break;
        for (uint32_t p = 0; p < g->plane_count; p++)
            if (at < g->planes[p].layers && view->entries[w->entry_first[p] + at].region >= 0)
                return at;
    }
    return at;
}

void fkv_runs_each(const fkv_runs *runs, const uint64_t *pointers, fkv_run_fn emit, void *context)
{
    walk w = {.runs = runs, .pointers = pointers, .emit = emit, .context = context};
    const fkv_geometry *g = runs->geometry;
    uint32_t entries = 0, heads = 0;
    for (uint32_t p = 0; p < g->plane_count; p++) {
        w.entry_first[p] = entries;
        entries += g->planes[p].layers;
        if (g->planes[p].heads > heads) heads = g->planes[p].heads;
    }
    w.counts[FKV_AXIS_LAYER] = fkv_geometry_layers(g);
    w.counts[FKV_AXIS_PLANE] = g->plane_count;
    w.counts[FKV_AXIS_HEAD] = heads;
    w.counts[FKV_AXIS_TOKEN] = runs->token_count;
    w.heads_in_order = walk_heads_in_order(runs->view, heads);
    const uint8_t *axes = runs->order->axes;
    uint32_t index[4] = {0}, *i0 = &index[axes[0]], *i1 = &index[axes[1]], *i2 = &index[axes[2]],
             *i3 = &index[axes[3]];
#define EACH(i, axis)                                                                              \
    for (*(i) = walk_next(&w, (axis), 0); *(i) < w.counts[axis];                                   \
         *(i) = walk_next(&w, (axis), *(i) + 1))
    EACH(i0, axes[0])
    EACH(i1, axes[1])
    EACH(i2, axes[2])
    for (*i3 = 0; *i3 < w.counts[axes[3]];) *i3 += walk_vectors(&w, index, axes[3]);
#undef EACH
    if (w.length) emit(context, w.stored, w.memory, w.length);
}
