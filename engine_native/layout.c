/* layout.c: where the vectors of a block lie in the caller's memory.
 *
 * Invariants
 *  - a block is a box of (layer, plane, head, token) vectors; planes may differ in layers, heads
 * and vector length; a contiguous block holds just the vectors that exist, in the lexicographic
 * order of its axes;
 *  - heads and tokens are strided, layers and planes have an entry each: only a head axis outside
 * the plane axis asks for planes of equally many heads;
 *  - sums stay in 64 bits: geometries whose blocks don't are refused.
 */
#include "flashkv_native.h"

#include <errno.h>
#include <stdbool.h>

#define ANY (-1)

typedef struct {
    const fkv_geometry *geometry;
    uint32_t tokens;
    uint32_t position[4]; /* of each FKV_AXIS_* in the order */
} layout;

/* Bytes of all vectors whose axes from position `from` on are free; plane, layer: ANY where free.
 */
static uint64_t box_bytes(const layout *box, uint32_t from, int64_t plane, int64_t layer)
{
    uint64_t bytes = 0;
    for (uint32_t p = 0; p < box->geometry->plane_count; p++) {
        const fkv_plane_row *row = &box->geometry->planes[p];
        if (plane != ANY && plane != p) continue;
        if (layer != ANY && layer >= row->layers) continue;
        uint64_t part = row->vector_bytes;
        if (layer == ANY) part *= row->layers;
        if (box->position[FKV_AXIS_HEAD] >= from) part *= row->heads;
        if (box->position[FKV_AXIS_TOKEN] >= from) part *= box->tokens;
        bytes += part;
    }
    return bytes;
}

static int read_order(layout *box, const fkv_order_row *order, uint32_t region_axes)
{
    uint32_t seen = 0, regions = 0;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t axis = order->axes[i];
        if (axis > FKV_AXIS_TOKEN || (seen & (1u << axis))) return -EINVAL;
        seen |= 1u << axis;
        box->position[axis] = i;
    }
    if (region_axes & ~((1u << FKV_AXIS_LAYER) | (1u << FKV_AXIS_PLANE))) return -EINVAL;
    for (uint32_t i = 0; i < 4 && (region_axes & (1u << order->axes[i])); i++)
        regions |= 1u << order->axes[i];
    return regions == region_axes ? 0 : -EINVAL;
}

static int check_geometry(const layout *box)
{
    const fkv_geometry *geometry = box->geometry;
    if (geometry->plane_count == 0 || geometry->plane_count > FKV_PLANES_MAX || box->tokens == 0)
        return -EINVAL;
    uint64_t total = 0;
    for (uint32_t p = 0; p < geometry->plane_count; p++) {
        const fkv_plane_row *row = &geometry->planes[p];
        uint64_t bytes = 0;
        if (row->layers == 0 || row->heads == 0 || row->vector_bytes == 0) return -EINVAL;
        if (__builtin_mul_overflow((uint64_t)row->layers * row->heads, row->vector_bytes, &bytes)
            || __builtin_mul_overflow(bytes, box->tokens, &bytes)
            || __builtin_add_overflow(total, bytes, &total) || total > INT64_MAX)
            return -EINVAL;
        if (row->heads != geometry->planes[0].heads
            && box->position[FKV_AXIS_HEAD] < box->position[FKV_AXIS_PLANE])
            return -EINVAL;
    }
    return 0;
}

/* Region of (plane, layer), counting in the order's sequence the combinations that exist. */
static int64_t region_of(const layout *box, uint32_t region_axes, uint32_t plane, uint32_t layer)
{
    const fkv_geometry *geometry = box->geometry;
    int64_t region = 0;
    if (region_axes == 0) return 0;
    if (region_axes == 1u << FKV_AXIS_PLANE) return plane;
    if (region_axes == 1u << FKV_AXIS_LAYER) return layer;
    for (uint32_t p = 0; p < geometry->plane_count; p++) {
        uint32_t layers = geometry->planes[p].layers;
        if (box->position[FKV_AXIS_PLANE] < box->position[FKV_AXIS_LAYER])
            region += p < plane ? layers : p == plane ? layer : 0;
        else if (p < plane) /* whole layers before, and this layer */
            region += layers < layer + 1 ? layers : layer + 1;
        else
            region += layers < layer ? layers : layer;
    }
    return region;
}

static int64_t offset_of(const layout *box, uint32_t region_axes, uint32_t plane, uint32_t layer)
{
    uint32_t at_plane = box->position[FKV_AXIS_PLANE], at_layer = box->position[FKV_AXIS_LAYER];
    uint64_t offset = 0;
    if (!(region_axes & (1u << FKV_AXIS_PLANE)))
        for (uint32_t p = 0; p < plane; p++)
            offset += box_bytes(box, at_plane + 1, p, at_layer < at_plane ? (int64_t)layer : ANY);
    if (!(region_axes & (1u << FKV_AXIS_LAYER)))
        for (uint32_t l = 0; l < layer; l++)
            offset += box_bytes(box, at_layer + 1, at_plane < at_layer ? (int64_t)plane : ANY, l);
    return (int64_t)offset;
}

static int64_t stride_of(const layout *box, uint32_t axis, uint32_t plane, uint32_t layer)
{
    uint32_t at = box->position[axis];
    int64_t fixed_plane = box->position[FKV_AXIS_PLANE] < at ? (int64_t)plane : ANY;
    int64_t fixed_layer = box->position[FKV_AXIS_LAYER] < at ? (int64_t)layer : ANY;
    return (int64_t)box_bytes(box, at + 1, fixed_plane, fixed_layer);
}

int fkv_view_fill(const fkv_geometry *geometry, const fkv_order_row *order, uint32_t region_axes,
                  fkv_place_in_memory *entries, uint64_t *region_bytes)
{
    layout box = {.geometry = geometry, .tokens = order->block_tokens};
    int status = read_order(&box, order, region_axes);
    if (status == 0) status = check_geometry(&box);
    if (status != 0) return status;
    uint32_t inner = (uint32_t)__builtin_popcount(region_axes);
    int64_t regions = 0;
    bool planes_apart = region_axes & (1u << FKV_AXIS_PLANE);
    bool layers_apart = region_axes & (1u << FKV_AXIS_LAYER);
    for (uint32_t p = 0; p < geometry->plane_count; p++) {
        for (uint32_t l = 0; l < geometry->planes[p].layers; l++) {
            int64_t region = region_of(&box, region_axes, p, l);
            if (region >= INT32_MAX) return -EINVAL;
            if (region >= regions) regions = region + 1;
            if (region_bytes)
                region_bytes[region] = box_bytes(&box, inner, planes_apart ? (int64_t)p : ANY,
                                                 layers_apart ? (int64_t)l : ANY);
            if (!entries) continue;
            *entries++ = (fkv_place_in_memory){
                .region = (int32_t)region,
                .offset = offset_of(&box, region_axes, p, l),
                .head_stride = stride_of(&box, FKV_AXIS_HEAD, p, l),
                .token_stride = stride_of(&box, FKV_AXIS_TOKEN, p, l),
            };
        }
    }
    return (int)regions;
}

uint64_t fkv_block_bytes(const fkv_geometry *geometry, uint32_t tokens)
{
    uint64_t bytes = 0;
    for (uint32_t p = 0; p < geometry->plane_count; p++) {
        const fkv_plane_row *row = &geometry->planes[p];
        bytes += (uint64_t)row->layers * row->heads * row->vector_bytes * tokens;
    }
    return bytes;
}
