// What the two halves of the runtime share: the launcher (runtime.cpp) and the detector (trace.cpp).
#pragma once
#include "shim.h"
#include <vector>

namespace cpu {

constexpr size_t ZONE = 256;       // bytes kept free before, between and after shared arrays
constexpr int DYNAMIC = -2;        // the array number of `extern __shared__`

// -- mirrored in abi.py --

struct Place {                     // in the source: a file and line, or a program counter still to be looked up
    const char *file;
    int line;
    uintptr_t pc;
};

enum Kind : int {
    EARLY_RETURN, DIVERGENT_BARRIER, DIVERGENT_WARP, NOT_IN_MASK, DEADLOCK, STACK_OVERFLOW, FAULT, DIVISION, TRAP,
    PAST_THE_END, RACE, RACE_BETWEEN_BLOCKS, OUT_OF_BOUNDS, UNINITIALISED, MISALIGNED,
};

struct Finding {
    Kind kind;
    int fatal;
    Place here, there;
    int array, size;               // the array's number, bytes of the access
    int write, other_write;
    int64_t offset;                // bytes from the array's start
    int64_t block, other_block;
    int thread, other_thread;
    int64_t count;
    char note[96];
};

enum State : int { READY, AT_BARRIER, IN_WARP, DONE };

struct Standing {
    int thread, state, running;
    Place here;
};

struct Launch {
    void (*entry)(void **);
    unsigned grid[3], block[3];
    void **args;
    size_t arena_bytes, dynamic_offset, dynamic_bytes;
};

// -- a block in progress --

struct Thread {
    void *sp;
    State state;
    int index;
    uint3 threadIdx;
    Place here;                    // the barrier or warp operation that it reached last
    char *stack;
    unsigned mask;                 // of the warp operation it waits in; what it deposits; what the last one calls
    int flags;
    void *mine;
    Together all;
};

struct Warp { unsigned alive, waiting; };

struct Worker {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Thread *self = nullptr, *first = nullptr;          // running now; first at the barrier
    void *main_sp = nullptr;
    char *stacks = nullptr;
    size_t stacks_size = 0;
    int n = 0, arrived = 0, exited = 0, last_exit = 0, votes = 0, result = 0;
    int64_t block = 0;
    int asked = 0;                                     // how often it was asked to stop
    volatile int busy = 0;                             // in the detector or in a report: do not interrupt
};

extern PER_WORKER Worker *worker;

Finding finding(Kind kind, Place here, Place there = Place());
Finding &report(const Finding &f);                     // remember it
[[noreturn]] void fail(Finding f);                     // remember it and end the launch

// -- the detector's hooks: nothing in fast mode --

#ifdef CPU_TRACE
void trace_start(Worker &);
void trace_block(Worker &);
void trace_barrier(Worker &);
void trace_warp(Worker &, int warp, unsigned lanes, int flags);
void trace_warp_end(Worker &, int warp);
void trace_end(Worker &);
#else
inline void trace_start(Worker &) {}
inline void trace_block(Worker &) {}
inline void trace_barrier(Worker &) {}
inline void trace_warp(Worker &, int, unsigned, int) {}
inline void trace_warp_end(Worker &, int) {}
inline void trace_end(Worker &) {}
#endif

}
