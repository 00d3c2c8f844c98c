/* sim_state.h: what the simulated device's files share: io_sim.c (the backend), sim_faults.c (what
 * goes wrong, when and in which order), sim_recording.c (what was written). Test builds only.
 *
 * Invariants
 *  - `lock` guards everything here; it is taken before a backend's own lock, never after;
 *  - what an operation will meet (its number, its place in the order, its fault, its due time, the
 *    file behind its descriptor) is settled when it is submitted, and anew when it is repeated;
 *  - one thread at a time carries out, answers and frees operations: the device's, or who drains.
 */
#ifndef FLASHKV_SIM_STATE_H
#define FLASHKV_SIM_STATE_H
#include "io_queue.h"
#include "sim.h"

#define SIM_KINDS 3 /* READ, WRITE, SYNC */
#define SIM_CHANNELS_MAX 256
#define SIM_NEVER UINT64_MAX

typedef struct sim_op sim_op;
struct sim_op {
    sim_op *next, *previous; /* in the order of submission */
    fkv_io_op *op;
    uint64_t index; /* of submission */
    uint64_t key;   /* the lowest is answered first, of equal ones the later */
    uint64_t due_ns;
    uint64_t late_left; /* later operations to wait for */
    fkv_sim_fault outcome;
    bool fails;   /* `outcome` counts */
    bool hanging; /* until released */
    bool late;    /* waits for later ones */
    bool early;   /* only the rate holds it back: may be carried out before it is due */
    bool carried; /* out; `result` is known */
    bool dropped; /* given up while it waited to be issued */
    int64_t result;
    uint64_t event, generation; /* in the recording; SIM_NEVER: not recorded */
    uint32_t inode, alignment;
};

typedef struct {
    uint32_t inode;
    uint32_t alignment; /* 0: not bound */
} sim_binding;

struct fkv_sim {
    pthread_mutex_t lock;
    pthread_cond_t work;

    /* the engine that is open on it, and what it was given to do */
    fkv_backend *backend;
    sim_op *head, *tail;
    fkv_io_queue queue; /* of a depth: what was not issued yet */
    uint32_t depth;     /* 0: all is issued at once */
    uint64_t submitted;
    bool stopping; /* nothing is held back any more */
    bool inlined;  /* engines that are opened from here on have no thread */
    bool draining; /* with no thread: somebody carries operations out */

    sim_binding *bindings; /* by descriptor */
    uint32_t binding_count;

    fkv_sim_event *events;
    uint64_t event_count, event_room;
    uint64_t generation; /* of the recording; fkv_sim_forget() begins the next */
    bool recording, recording_failed;

    fkv_sim_fault *faults;
    uint64_t fault_count, fault_room;
    uint64_t calls[SIM_KINDS], hits, hanging;

    uint64_t seed;
    uint32_t window;
    uint64_t bytes_per_s, latency_ns;
    uint32_t channels;
    uint64_t channel_free_ns[SIM_CHANNELS_MAX], transfer_free_ns;
};

void sim_drain(fkv_sim *sim); /* io_sim.c: with no thread, carries out what is due */

/* ---- all with sim->lock held ---- */
/* sim_recording.c */
void sim_identify(fkv_sim *sim, sim_op *s); /* the file behind its descriptor */
void sim_record_begin(fkv_sim *sim, sim_op *s);
void sim_record_end(fkv_sim *sim, sim_op *s); /* op->result is final */

/* sim_faults.c */
void sim_arm(fkv_sim *sim, sim_op *s); /* a call: counts it, draws what it meets and when */
/* What to do next: answer it (*answer), or only carry it out. NULL: nothing before *wake_ns. */
sim_op *sim_pick(fkv_sim *sim, bool *answer, uint64_t *wake_ns);
void sim_answered(fkv_sim *sim, const sim_op *s); /* it left the list */
#endif
