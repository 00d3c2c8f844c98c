/* io_queue.h: what waits for the device, in two classes: realtime before background.
 *
 * Invariants
 *  - of a class, first come, first served; what is done again goes to its front;
 *  - a class never shuts the other out: background has part of the depth only, less while realtime
 *    reads are about, and after FKV_PASSED_MAX realtime operations that passed it one of its own goes;
 *  - who takes again after each end, and when fkv_io_queue_look_ns() says, leaves nothing waiting that
 *    could go.
 *
 * No lock of its own: it belongs to a backend's thread, or lies under a backend's lock.
 */
#ifndef FLASHKV_IO_QUEUE_H
#define FLASHKV_IO_QUEUE_H
#include "io.h"

#define FKV_PASSED_MAX 16
#define FKV_BACKGROUND_BESIDE                                                                      \
    2 /* background operations at the device while realtime reads are about */
#define FKV_BESIDE_NS 20000000ull /* ... and for so long afterwards: the next are likely to come */

typedef struct {
    fkv_io_op *head, *tail;
    uint64_t count;
} fkv_op_list;

typedef struct {
    fkv_op_list waiting[2]; /* realtime, background */
    uint32_t running[2];
    uint32_t reads; /* of the running ones: realtime reads */
    uint32_t depth; /* most that run */
    uint32_t passed;
    uint64_t read_ended_ns; /* the last realtime one; 0: none yet */
} fkv_io_queue;

void fkv_op_list_join(fkv_op_list *list, fkv_op_list *more); /* empties more */
void fkv_op_list_add(fkv_op_list *list, fkv_io_op *op);
fkv_io_op *fkv_op_list_take(fkv_op_list *list);

void fkv_io_queue_init(fkv_io_queue *queue, uint32_t depth);
void fkv_io_queue_add(fkv_io_queue *queue, fkv_io_op *list); /* linked by next, in order */
/* The operation to issue now, or NULL; it runs until fkv_io_queue_done() or _again(). */
fkv_io_op *fkv_io_queue_take(fkv_io_queue *queue);
void fkv_io_queue_done(fkv_io_queue *queue, const fkv_io_op *op);
void fkv_io_queue_again(fkv_io_queue *queue, fkv_io_op *op); /* it goes before what waits */
/* When, on the monotonic clock, background may go on merely because time has passed; 0: it needn't. */
uint64_t fkv_io_queue_look_ns(const fkv_io_queue *queue);
static inline bool fkv_io_queue_idle(const fkv_io_queue *queue)
{
    return queue->waiting[0].count + queue->waiting[1].count == 0
           && queue->running[0] + queue->running[1] == 0;
}
/* Whether a realtime operation that came now would be issued at once. */
static inline bool fkv_io_queue_has_room(const fkv_io_queue *queue)
{
    return queue->waiting[0].count + queue->running[0] + queue->running[1] < queue->depth;
}
#endif
