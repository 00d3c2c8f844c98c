/* sim_recording.c: which files the simulated device knows, and what it was told to write, when and
 * with which end. Test builds only.
 *
 * Invariants
 *  - events stand in the order in which operations were submitted and syncs ended; positions never
 *    change until fkv_sim_forget();
 *  - an operation that was submitted before fkv_sim_forget() leaves no trace in what comes after;
 *  - memory that runs out is not hidden: fkv_sim_recording_failed().
 */
#include "sim_state.h"

#ifdef FKV_TEST_BUILD
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DESCRIPTORS_MAX (1 << 20)

/* ---- descriptors ---- */

int fkv_sim_bind(fkv_sim *sim, int32_t fd, uint32_t inode, uint32_t alignment)
{
    if (fd < 0 || fd >= DESCRIPTORS_MAX || alignment == 0 || (alignment & (alignment - 1)) != 0)
        return -EINVAL;
    int status = 0;
    pthread_mutex_lock(&sim->lock);
    if ((uint32_t)fd >= sim->binding_count) {
        uint32_t count = (uint32_t)fd + 64;
        sim_binding *grown = realloc(sim->bindings, count * sizeof *grown);
        if (grown == NULL) {
            status = -ENOMEM;
        } else {
            memset(grown + sim->binding_count, 0, (count - sim->binding_count) * sizeof *grown);
            sim->bindings = grown;
            sim->binding_count = count;
        }
    }
    if (status == 0) sim->bindings[fd] = (sim_binding){inode, alignment};
    pthread_mutex_unlock(&sim->lock);
    return status;
}

void fkv_sim_unbind(fkv_sim *sim, int32_t fd)
{
    pthread_mutex_lock(&sim->lock);
    if (fd >= 0 && (uint32_t)fd < sim->binding_count) sim->bindings[fd] = (sim_binding){0};
    pthread_mutex_unlock(&sim->lock);
}

void sim_identify(fkv_sim *sim, sim_op *s)
{
    int32_t fd = s->op->fd;
    if (fd < 0 || (uint32_t)fd >= sim->binding_count) return;
    s->inode = sim->bindings[fd].inode;
    s->alignment = sim->bindings[fd].alignment;
}

/* ---- events ---- */

static fkv_sim_event *event_add(fkv_sim *sim, uint32_t kind, uint32_t inode)
{
    if (sim->event_count == sim->event_room) {
        uint64_t room = sim->event_room ? 2 * sim->event_room : 256;
        fkv_sim_event *grown = realloc(sim->events, room * sizeof *grown);
        if (grown == NULL) {
            sim->recording_failed = true;
            return NULL;
        }
        sim->events = grown;
        sim->event_room = room;
    }
    fkv_sim_event *event = &sim->events[sim->event_count++];
    *event = (fkv_sim_event){.kind = kind, .inode = inode, .ended = SIM_NEVER};
    return event;
}

static uint8_t *bytes_of(const fkv_io_op *op)
{
    uint8_t *copy = malloc(op->remaining ? op->remaining : 1);
    uint64_t at = 0;
    for (unsigned i = 0; copy != NULL && i < op->iov_count; at += op->iov[i++].iov_len)
        memcpy(copy + at, op->iov[i].iov_base, op->iov[i].iov_len);
    return copy;
}

void sim_record_begin(fkv_sim *sim, sim_op *s)
{
    const fkv_io_op *op = s->op;
    s->event = SIM_NEVER;
    if (!sim->recording || s->alignment == 0 || op->kind == FKV_IO_READ) return;
    uint8_t *copy = NULL;
    if (op->kind == FKV_IO_WRITE && (copy = bytes_of(op)) == NULL) {
        sim->recording_failed = true;
        return;
    }
    fkv_sim_event *event =
        event_add(sim, op->kind == FKV_IO_WRITE ? FKV_SIM_WRITE : FKV_SIM_SYNC, s->inode);
    if (event == NULL) {
        free(copy);
        return;
    }
    event->offset = op->offset;
    event->length = op->remaining;
    event->data = copy;
    event->result = 1;
    s->event = sim->event_count - 1;
    s->generation = sim->generation;
}

void sim_record_end(fkv_sim *sim, sim_op *s)
{
    if (s->event == SIM_NEVER || s->generation != sim->generation) return;
    if (s->op->kind == FKV_IO_SYNC) {
        fkv_sim_event *end = event_add(sim, FKV_SIM_SYNC_END, s->inode);
        if (end == NULL) return;
        end->begun = s->event;
        end->result = s->op->result;
    }
    sim->events[s->event].result = s->op->result;
    sim->events[s->event].ended = sim->event_count;
}

void fkv_sim_record(fkv_sim *sim, int on)
{
    pthread_mutex_lock(&sim->lock);
    sim->recording = on != 0;
    pthread_mutex_unlock(&sim->lock);
}

uint64_t fkv_sim_note(fkv_sim *sim, uint32_t number)
{
    pthread_mutex_lock(&sim->lock);
    bool noted = sim->recording && event_add(sim, FKV_SIM_NOTE, number) != NULL;
    uint64_t position = noted ? sim->event_count - 1 : SIM_NEVER;
    pthread_mutex_unlock(&sim->lock);
    return position;
}

uint64_t fkv_sim_event_count(fkv_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t count = sim->event_count;
    pthread_mutex_unlock(&sim->lock);
    return count;
}

uint64_t fkv_sim_events(fkv_sim *sim, uint64_t first, uint64_t count, fkv_sim_event *events)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t there = first < sim->event_count ? sim->event_count - first : 0;
    if (count > there) count = there;
    if (count > 0) memcpy(events, sim->events + first, count * sizeof *events);
    pthread_mutex_unlock(&sim->lock);
    return count;
}

void fkv_sim_forget(fkv_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    for (uint64_t i = 0; i < sim->event_count; i++) free((void *)sim->events[i].data);
    free(sim->events);
    sim->events = NULL;
    sim->event_count = sim->event_room = 0;
    sim->recording_failed = false;
    sim->generation++;
    pthread_mutex_unlock(&sim->lock);
}

int fkv_sim_recording_failed(fkv_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    int failed = sim->recording_failed;
    pthread_mutex_unlock(&sim->lock);
    return failed;
}

#endif
