/* workers.c: the threads that check, decode and encode.
 *
 * Invariants
 *  - of a class, tasks start in the order in which they were pushed; realtime ones first, but
 *    that after PASSED_MAX of them that passed a background task it is that one's turn;
 *  - push() never blocks and wakes a thread only if one sleeps; with no thread it runs the task;
 *  - fkv_workers_free() runs everything that was pushed before it returns.
 */
#include "allocate.h"
#include "io.h"

#define PASSED_MAX 16

typedef struct {
    fkv_task *head, *tail;
} task_list;

struct fkv_workers {
    pthread_mutex_t lock;
    pthread_cond_t work;
    task_list realtime, background;
    uint32_t passed; /* realtime tasks since a background one waits */
    uint32_t idle;
    bool stopping;
    uint32_t count;
    pthread_t threads[];
};

static fkv_task *task_take(fkv_workers *workers)
{
    bool turn = workers->realtime.head == NULL || workers->passed >= PASSED_MAX;
    task_list *list =
        workers->background.head != NULL && turn ? &workers->background : &workers->realtime;
    fkv_task *task = list->head;
    if (task == NULL) return NULL;
    list->head = task->next;
    if (list == &workers->background)
        workers->passed = 0;
    else if (workers->background.head != NULL)
        workers->passed++;
    return task;
}

static void *worker_main(void *argument)
{
    fkv_workers *workers = argument;
    pthread_mutex_lock(&workers->lock);
    for (;;) {
        fkv_task *task = task_take(workers);
        if (task != NULL) {
            pthread_mutex_unlock(&workers->lock);
            task->run(task);
            pthread_mutex_lock(&workers->lock);
        } else if (workers->stopping) {
            break;
        } else {
            workers->idle++;
            pthread_cond_wait(&workers->work, &workers->lock);
            workers->idle--;
        }
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

fkv_workers *fkv_workers_new(uint32_t count)
{
    fkv_workers *workers = fkv_calloc(1, sizeof *workers + count * sizeof workers->threads[0]);
    if (workers == NULL) return NULL;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->work, NULL);
    for (; workers->count < count; workers->count++) {
        if (fkv_thread_start(&workers->threads[workers->count], "fkv-work", worker_main, workers)
            != 0)
            break;
    }
    if (workers->count == 0 && count > 0) {
        fkv_workers_free(workers);
        return NULL;
    }
    return workers;
}

void fkv_workers_free(fkv_workers *workers)
{
    if (workers == NULL) return;
    pthread_mutex_lock(&workers->lock);
    workers->stopping = true;
    pthread_cond_broadcast(&workers->work);
    pthread_mutex_unlock(&workers->lock);
    for (uint32_t i = 0; i < workers->count; i++) pthread_join(workers->threads[i], NULL);
    pthread_cond_destroy(&workers->work);
    pthread_mutex_destroy(&workers->lock);
    fkv_free(workers);
}

void fkv_workers_push(fkv_workers *workers, fkv_task *task)
{
    if (workers->count == 0) {
        task->run(task);
        return;
    }
    task->next = NULL;
    pthread_mutex_lock(&workers->lock);
    task_list *list = task->background ? &workers->background : &workers->realtime;
    if (list->head == NULL)
        list->head = task;
    else
        list->tail->next = task;
    list->tail = task;
    if (workers->idle > 0) pthread_cond_signal(&workers->work);
    pthread_mutex_unlock(&workers->lock);
}
