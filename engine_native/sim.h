/* sim.h: the simulated device, a peer of io_uring and threads in test builds (FKV_TEST_BUILD). It
 * carries operations out on real files and, on the way, records them, fails them, holds them back,
 * answers them out of order and keeps to a rate.
 *
 * Invariants
 *  - a device outlives the engines that are opened on it (fkv_engine_options.sim), and may see
 *    several, one after the other;
 *  - a write stands in the recording from its submission on, with a copy of its bytes, whatever
 *    becomes of it; a sync as two events, begun and ended, so that what a crash between any two
 *    events may leave can be told from the recording alone;
 *  - all choices follow from the seed and the order of submission;
 *  - what holds an operation back never outlives the engine: closing releases it.
 *
 * build.py gives this file to cffi as well, in test builds only.
 */
#ifndef FLASHKV_SIM_H
#define FLASHKV_SIM_H
#include "flashkv_native.h"

/* ---- kinds of operations and events ---- */
#define FKV_SIM_READ 0 /* counted and failed, never recorded */
#define FKV_SIM_WRITE 1
#define FKV_SIM_SYNC 2
#define FKV_SIM_SYNC_END 3
#define FKV_SIM_NOTE 4 /* what the caller does to files himself, in its place in the order */

typedef struct {
    uint64_t offset;
    uint64_t length;
    const uint8_t *data; /* WRITE: a copy of what was to be written, until fkv_sim_forget() */
    uint64_t begun;      /* SYNC_END: position of its SYNC */
    uint64_t ended;      /* WRITE: events that stood in the recording when it ended, so that a SYNC
                            at this position or behind it covers it; UINT64_MAX: not ended */
    uint32_t kind;
    uint32_t inode; /* NOTE: the caller's number */
    int32_t result; /* of WRITE, SYNC and SYNC_END: 0 or -errno; 1: not ended */
    uint32_t reserved;
} fkv_sim_event;

/* ---- what goes wrong: at most one of LATE, SLOW, HANG and one of the others meet in a call, of
 * each the one that was added first ---- */
#define FKV_SIM_FAIL 0  /* answers `result`; of a write, `amount` bytes reach the file first */
#define FKV_SIM_SHORT 1 /* moves and answers `amount` bytes (0: a zero result); READ, WRITE */
#define FKV_SIM_LATE 2  /* answers after `amount` later operations, or when nothing else is left */
#define FKV_SIM_SLOW 3  /* takes `amount` microseconds longer */
#define FKV_SIM_HANG 4  /* answers after fkv_sim_release() or at the close of the engine */
#define FKV_SIM_FLIP 5  /* a read answers with bit `amount` (modulo its length) wrong */
#define FKV_SIM_LOSE 6  /* a write answers as done and leaves the file as it was */
#define FKV_SIM_STRAY 7 /* a write lands `amount` bytes behind its place */

typedef struct {
    uint32_t kind;   /* FKV_SIM_READ, WRITE or SYNC */
    uint32_t action; /* FKV_SIM_FAIL ... */
    uint64_t first;  /* the n-th call of that kind since fkv_sim_reset(), from 1, in the order of
                        submission (a repeat: when it is issued again); */
    uint64_t count;  /* and how many from there on (UINT64_MAX: all) */
    int64_t result;
    uint64_t amount;
} fkv_sim_fault;

fkv_sim *fkv_sim_new(uint64_t seed); /* NULL: no memory */
void fkv_sim_free(fkv_sim *sim);     /* no engine may be open on it */

/* Whose file a descriptor is, from here on. Operations on others are carried out, counted and
 * failed, but not recorded. alignment: as O_DIRECT asks (1: none); what isn't aligned in address,
 * offset and length answers -EINVAL. 0, or -ENOMEM, -EINVAL. */
int fkv_sim_bind(fkv_sim *sim, int32_t fd, uint32_t inode, uint32_t alignment);
void fkv_sim_unbind(fkv_sim *sim, int32_t fd);

/* ---- the recording ---- */
void fkv_sim_record(fkv_sim *sim, int on);            /* off at first */
uint64_t fkv_sim_note(fkv_sim *sim, uint32_t number); /* position of the note; UINT64_MAX: off */
uint64_t fkv_sim_event_count(fkv_sim *sim);
/* Copies events [first, first + count); returns how many there were. */
uint64_t fkv_sim_events(fkv_sim *sim, uint64_t first, uint64_t count, fkv_sim_event *events);
void fkv_sim_forget(fkv_sim *sim);          /* empties the recording */
int fkv_sim_recording_failed(fkv_sim *sim); /* memory ran out: the recording has a gap */

/* ---- faults ---- */
int fkv_sim_add_fault(fkv_sim *sim, const fkv_sim_fault *fault); /* 0 or -ENOMEM, -EINVAL */
void fkv_sim_reset(fkv_sim *sim);                                /* no faults, calls from 0 */
uint64_t fkv_sim_calls(fkv_sim *sim, uint32_t kind); /* since fkv_sim_reset(), repeats included */
uint64_t fkv_sim_hits(fkv_sim *sim);                 /* calls that a fault changed */
void fkv_sim_release(fkv_sim *sim);                  /* lets what hangs go on */
uint64_t fkv_sim_hanging(fkv_sim *sim);

/* ---- order and speed ---- */
/* Engines that are opened from here on have no device thread: who submits an operation carries it
 * out, and every one that is due. With workers = 0 in their options nothing runs but the caller. */
void fkv_sim_inline(fkv_sim *sim, int on);
/* At most `depth` operations are at the device at once, the others wait as on the other backends
 * (io_queue.h); 0: none waits. While no engine is open. */
void fkv_sim_depth(fkv_sim *sim, uint32_t depth);
/* Answers in an order drawn from the seed among up to `window` operations; 1: as submitted. */
void fkv_sim_order(fkv_sim *sim, uint32_t window);
/* A device of `channels` that each take latency_us an operation, which share bytes_per_s. 0: as
 * fast as the machine. */
void fkv_sim_rate(fkv_sim *sim, uint64_t bytes_per_s, uint32_t latency_us, uint32_t channels);

/* ---- memory that runs out ---- */
/* Of the data plane's allocations from now on, over all threads, the first-th to
 * (first + count - 1)-th fail; 0 and 0: none. Starts counting anew. */
void fkv_alloc_fail(uint64_t first, uint64_t count);
uint64_t fkv_alloc_calls(void); /* since fkv_alloc_fail() */
uint64_t fkv_alloc_live(void);  /* allocations that were not given back */
#endif
