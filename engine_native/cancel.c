/* cancel.c: reads that are given up, and the queue that tells which reads are over.
 *
 * Invariants
 *  - who gives a read up waits for decoding that is under way, never for the device;
 *  - statuses are final then: whoever needs an extent that isn't placed has failed, and what comes later
 * fails nobody else;
 *  - each tag is reaped once; a read is freed by who reaped it.
 */
#include "reader.h"

/* ---- writing to the caller's memory ---- */

bool fkv_place_begin(fkv_read_job *job)
{
    atomic_fetch_add(&job->placing, 1);
    if (!atomic_load(&job->given_up)) return true;
    fkv_place_end(job);
    return false;
}

void fkv_place_end(fkv_read_job *job)
{
    if (atomic_fetch_sub(&job->placing, 1) != 1 || !atomic_load(&job->given_up)) return;
    pthread_mutex_lock(&job->lock);
    pthread_cond_broadcast(&job->done);
    pthread_mutex_unlock(&job->lock);
}

/* ---- giving up ---- */

/* No extent is added any more: that was done by who began the read, or while something was placed. */
static void fail_the_rest(fkv_read_job *job)
{
    for (uint64_t i = 0; i < job->batch->record_count; i++)
        for (fkv_extent *e = job->readings[i].extents; e; e = e->next)
            if (!e->placed) fkv_extent_lost(e, FKV_CANCELLED);
}

int fkv_read_cancel(fkv_read_job *job)
{
    atomic_store(&job->given_up, true);
    pthread_mutex_lock(&job->lock);
    while (atomic_load(&job->placing) != 0) pthread_cond_wait(&job->done, &job->lock);
    pthread_mutex_unlock(&job->lock);
    fail_the_rest(job);
    return atomic_load(&job->direct_flights) == 0;
}

/* ---- what is over ---- */

void fkv_read_report(fkv_read_job *job)
{
    fkv_engine *engine = job->engine;
    pthread_mutex_lock(&engine->read_lock);
    job->next = NULL;
    if (engine->reads_over)
        engine->reads_over_last->next = job;
    else
        engine->reads_over = job;
    engine->reads_over_last = job;
    pthread_cond_signal(&engine->read_over);
    pthread_mutex_unlock(&engine->read_lock);
}

uint64_t fkv_read_reap(fkv_engine *engine, uint64_t *tags, uint64_t room, int64_t timeout_ms)
{
    struct timespec deadline = timeout_ms > 0 ? fkv_deadline(timeout_ms) : (struct timespec){0};
    uint64_t count = 0;
    pthread_mutex_lock(&engine->read_lock);
    while (!engine->reads_over && !engine->read_wake && timeout_ms != 0) {
        if (timeout_ms < 0)
            pthread_cond_wait(&engine->read_over, &engine->read_lock);
        else if (pthread_cond_timedwait(&engine->read_over, &engine->read_lock, &deadline) != 0)
            break;
    }
    engine->read_wake = false;
    for (; count < room && engine->reads_over; engine->reads_over = engine->reads_over->next)
        tags[count++] = engine->reads_over->tag;
    pthread_mutex_unlock(&engine->read_lock);
    return count;
}

void fkv_read_wake(fkv_engine *engine)
{
    pthread_mutex_lock(&engine->read_lock);
    engine->read_wake = true;
    pthread_cond_broadcast(&engine->read_over);
    pthread_mutex_unlock(&engine->read_lock);
}
