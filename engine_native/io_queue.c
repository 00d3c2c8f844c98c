/* io_queue.c: which of the waiting operations goes to the device next. */
#include "io_queue.h"
#include <assert.h>

#define REALTIME 0
#define BACKGROUND 1

void fkv_op_list_join(fkv_op_list *list, fkv_op_list *more)
{
    if (more->count == 0) return;
    if (list->count == 0)
        list->head = more->head;
    else
        list->tail->next = more->head;
    list->tail = more->tail;
    list->count += more->count;
    *more = (fkv_op_list){0};
}

void fkv_op_list_add(fkv_op_list *list, fkv_io_op *op)
{
    op->next = NULL;
    fkv_op_list one = {op, op, 1};
    fkv_op_list_join(list, &one);
}

fkv_io_op *fkv_op_list_take(fkv_op_list *list)
{
    fkv_io_op *op = list->head;
    if (op != NULL) {
        list->head = op->next;
        list->count--;
    }
    return op;
}

void fkv_io_queue_init(fkv_io_queue *queue, uint32_t depth)
{
    *queue = (fkv_io_queue){.depth = depth};
}

void fkv_io_queue_add(fkv_io_queue *queue, fkv_io_op *list)
{
    for (fkv_io_op *op = list, *next; op != NULL; op = next) {
        next = op->next;
        fkv_op_list_add(&queue->waiting[op->background ? BACKGROUND : REALTIME], op);
    }
}

static bool realtime_about(const fkv_io_queue *queue)
{
    if (queue->reads > 0 || queue->waiting[REALTIME].count > 0) return true;
    return queue->read_ended_ns != 0 && fkv_now_ns() - queue->read_ended_ns < FKV_BESIDE_NS;
}

/* Most background operations that may run, whatever realtime does. */
static uint32_t background_most(const fkv_io_queue *queue)
{
    uint32_t most = queue->depth - (queue->depth + 3) / 4;
    return most > 0 ? most : 1;
}

static bool background_may(const fkv_io_queue *queue)
{
    uint32_t running = queue->running[BACKGROUND];
    if (queue->waiting[BACKGROUND].count == 0 || running >= background_most(queue)) return false;
    return running < FKV_BACKGROUND_BESIDE || queue->passed >= FKV_PASSED_MAX
           || !realtime_about(queue);
}

uint64_t fkv_io_queue_look_ns(const fkv_io_queue *queue)
{
    uint32_t running = queue->running[BACKGROUND];
    bool held_back = queue->waiting[BACKGROUND].count > 0 && running >= FKV_BACKGROUND_BESIDE
                     && running < background_most(queue);
    if (!held_back || queue->reads > 0 || queue->waiting[REALTIME].count > 0) return 0;
    return queue->read_ended_ns + FKV_BESIDE_NS;
}

fkv_io_op *fkv_io_queue_take(fkv_io_queue *queue)
{
    if (queue->running[REALTIME] + queue->running[BACKGROUND] >= queue->depth) return NULL;
    bool realtime = queue->waiting[REALTIME].count > 0, background = background_may(queue);
    if (!realtime && !background) return NULL;
    int class =
        realtime && !(background && queue->passed >= FKV_PASSED_MAX) ? REALTIME : BACKGROUND;
    if (class == BACKGROUND)
        queue->passed = 0;
    else if (queue->waiting[BACKGROUND].count > 0)
        queue->passed++;
    fkv_io_op *op = fkv_op_list_take(&queue->waiting[class]);
    queue->running[class]++;
    queue->reads += class == REALTIME && op->kind == FKV_IO_READ;
    return op;
}

static void ended(fkv_io_queue *queue, const fkv_io_op *op)
{
    int class = op->background ? BACKGROUND : REALTIME;
    assert(queue->running[class] > 0);
    queue->running[class]--;
    queue->reads -= class == REALTIME && op->kind == FKV_IO_READ;
}

void fkv_io_queue_done(fkv_io_queue *queue, const fkv_io_op *op)
{
    ended(queue, op);
    if (!op->background && op->kind == FKV_IO_READ) queue->read_ended_ns = fkv_now_ns();
}

void fkv_io_queue_again(fkv_io_queue *queue, fkv_io_op *op)
{
    fkv_op_list *waiting = &queue->waiting[op->background ? BACKGROUND : REALTIME];
    fkv_op_list front = {op, op, 1};
    ended(queue, op);
    op->next = NULL;
    fkv_op_list_join(&front, waiting);
    *waiting = front;
}
