/* sim_faults.c: what goes wrong on the simulated device, how fast it is, and which operation it
 * answers next. Test builds only.
 *
 * Invariants
 *  - an operation's number among the calls of its kind is given at its submission, a repeat's when
 *    it is issued again;
 *  - one fault of time (LATE, SLOW, HANG) and one of outcome (the others) may meet in a call: of
 *    each the one that was added first;
 *  - the place in the order of answers follows from the seed and the number of submission, not from
 *    how many operations happen to be there: nobody is passed by more than window - 1 later ones.
 */
#include "sim_state.h"

#ifdef FKV_TEST_BUILD
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NS_PER_S 1000000000ull

static_assert(FKV_SIM_READ == FKV_IO_READ && FKV_SIM_WRITE == FKV_IO_WRITE
                  && FKV_SIM_SYNC == FKV_IO_SYNC,
              "kinds are those of operations");

/* A number that depends on every bit of the seed and the index. */
static uint64_t draw(uint64_t seed, uint64_t index)
{
    uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    for (int round = 0; round < 3; round++) {
        x ^= x >> 31;
        x *= 0xd6e8feb86659fd93ull;
    }
    return x ^ x >> 32;
}

static bool is_of_time(uint32_t action)
{
    return action == FKV_SIM_LATE || action == FKV_SIM_SLOW || action == FKV_SIM_HANG;
}

static const fkv_sim_fault *fault_of(const fkv_sim *sim, uint32_t kind, uint64_t call, bool of_time)
{
    for (uint64_t i = 0; i < sim->fault_count; i++) {
        const fkv_sim_fault *fault = &sim->faults[i];
        if (fault->kind == kind && call >= fault->first && call - fault->first < fault->count
            && is_of_time(fault->action) == of_time)
            return fault;
    }
    return NULL;
}

/* When the device has done it: a channel is taken for the latency, then the shared path moves the
 * bytes. Reckoned from due time to due time, so that a thread that wakes up late does not slow the
 * device down. */
static uint64_t done_at(fkv_sim *sim, const fkv_io_op *op, uint64_t extra_ns)
{
    uint64_t start = fkv_now_ns(), *channel = NULL;
    for (uint32_t i = 0; i < sim->channels; i++)
        if (channel == NULL || sim->channel_free_ns[i] < *channel)
            channel = &sim->channel_free_ns[i];
    if (channel != NULL && *channel > start) start = *channel;
    uint64_t done = start + sim->latency_ns + extra_ns;
    if (sim->bytes_per_s > 0 && op->kind != FKV_IO_SYNC) {
        if (sim->transfer_free_ns > done) done = sim->transfer_free_ns;
        done += (uint64_t)((double)op->remaining * (double)NS_PER_S / (double)sim->bytes_per_s);
        sim->transfer_free_ns = done;
    }
    if (channel != NULL) *channel = done;
    return done;
}

void sim_arm(fkv_sim *sim, sim_op *s)
{
    uint32_t kind = s->op->kind;
    uint64_t call = ++sim->calls[kind], extra_ns = 0;
    const fkv_sim_fault *time = fault_of(sim, kind, call, true);
    const fkv_sim_fault *outcome = fault_of(sim, kind, call, false);

    s->fails = outcome != NULL;
    if (outcome != NULL) s->outcome = *outcome;
    if (time != NULL || outcome != NULL) sim->hits++;
    s->late = s->hanging = s->carried = false;
    if (time != NULL && time->action == FKV_SIM_SLOW) extra_ns = time->amount * 1000;
    if (time != NULL && time->action == FKV_SIM_LATE) {
        s->late = true;
        s->late_left = time->amount;
    }
    if (time != NULL && time->action == FKV_SIM_HANG && !sim->stopping) {
        s->hanging = true;
        sim->hanging++;
    }
    bool rated = sim->latency_ns > 0 || sim->bytes_per_s > 0;
    s->early = rated && time == NULL;
    s->due_ns = rated || extra_ns > 0 ? done_at(sim, s->op, extra_ns) : 0;
    s->key = s->index + draw(sim->seed, s->index) % sim->window;
}

sim_op *sim_pick(fkv_sim *sim, bool *answer, uint64_t *wake_ns)
{
    sim_op *ready = NULL, *late = NULL, *early = NULL;
    bool others = false;
    uint64_t now = fkv_now_ns();

    *wake_ns = SIM_NEVER;
    for (sim_op *s = sim->head; s != NULL; s = s->next) {
        /* Later ones have higher keys; where nothing waits for a time, the search ends here. */
        if (ready != NULL && s->index > ready->key) break;
        if (s->hanging) continue;
        if (s->late && s->late_left > 0 && !sim->stopping) {
            if (late == NULL || s->late_left < late->late_left) late = s;
            continue;
        }
        others = true;
        if (s->due_ns <= now || sim->stopping) {
            if (ready == NULL || s->key <= ready->key) ready = s; /* or a window of 2 were none */
        } else {
            if (s->due_ns < *wake_ns) *wake_ns = s->due_ns;
            if (s->early && !s->carried && early == NULL) early = s;
        }
    }
    *answer = ready != NULL || early == NULL;
    if (ready != NULL) return ready;
    return others ? early : late;
}

void sim_answered(fkv_sim *sim, const sim_op *s)
{
    for (sim_op *other = sim->head; other != NULL && other->index < s->index; other = other->next)
        if (other->late && other->late_left > 0) other->late_left--;
}

/* ---- settings ---- */

static bool fault_possible(const fkv_sim_fault *fault)
{
    if (fault->kind >= SIM_KINDS || fault->first == 0 || fault->count == 0) return false;
    switch (fault->action) {
    case FKV_SIM_FAIL:
    case FKV_SIM_LATE:
    case FKV_SIM_SLOW:
    case FKV_SIM_HANG:
        return true;
    case FKV_SIM_SHORT:
        return fault->kind != FKV_SIM_SYNC;
    case FKV_SIM_FLIP:
        return fault->kind == FKV_SIM_READ;
    case FKV_SIM_LOSE:
    case FKV_SIM_STRAY:
        return fault->kind == FKV_SIM_WRITE;
    default:
        return false;
    }
}

int fkv_sim_add_fault(fkv_sim *sim, const fkv_sim_fault *fault)
{
    if (!fault_possible(fault)) return -EINVAL;
    int status = 0;
    pthread_mutex_lock(&sim->lock);
    if (sim->fault_count == sim->fault_room) {
        uint64_t room = sim->fault_room ? 2 * sim->fault_room : 16;
        fkv_sim_fault *grown = realloc(sim->faults, room * sizeof *grown);
        if (grown == NULL) {
            status = -ENOMEM;
        } else {
            sim->faults = grown;
            sim->fault_room = room;
        }
    }
    if (status == 0) sim->faults[sim->fault_count++] = *fault;
    pthread_mutex_unlock(&sim->lock);
    return status;
}

void fkv_sim_reset(fkv_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    sim->fault_count = sim->hits = 0;
    memset(sim->calls, 0, sizeof sim->calls);
    pthread_mutex_unlock(&sim->lock);
}

static uint64_t read_locked(fkv_sim *sim, const uint64_t *value)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t copy = *value;
    pthread_mutex_unlock(&sim->lock);
    return copy;
}

uint64_t fkv_sim_calls(fkv_sim *sim, uint32_t kind)
{
    return kind < SIM_KINDS ? read_locked(sim, &sim->calls[kind]) : 0;
}

uint64_t fkv_sim_hits(fkv_sim *sim) { return read_locked(sim, &sim->hits); }

uint64_t fkv_sim_hanging(fkv_sim *sim) { return read_locked(sim, &sim->hanging); }

void fkv_sim_release(fkv_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    for (sim_op *s = sim->head; s != NULL; s = s->next) s->hanging = false;
    sim->hanging = 0;
    pthread_cond_signal(&sim->work);
    sim_drain(sim);
    pthread_mutex_unlock(&sim->lock);
}

void fkv_sim_order(fkv_sim *sim, uint32_t window)
{
    pthread_mutex_lock(&sim->lock);
    sim->window = window > 0 ? window : 1;
    pthread_mutex_unlock(&sim->lock);
}

void fkv_sim_rate(fkv_sim *sim, uint64_t bytes_per_s, uint32_t latency_us, uint32_t channels)
{
    pthread_mutex_lock(&sim->lock);
    sim->bytes_per_s = bytes_per_s;
    sim->latency_ns = 1000ull * latency_us;
    sim->channels = channels < SIM_CHANNELS_MAX ? channels : SIM_CHANNELS_MAX;
    memset(sim->channel_free_ns, 0, sizeof sim->channel_free_ns);
    sim->transfer_free_ns = 0;
    pthread_mutex_unlock(&sim->lock);
}

#endif
