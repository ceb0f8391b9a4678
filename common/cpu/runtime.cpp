// Runs the blocks of a launch: CUDA threads as fibers, blocks spread over OS threads.
//
// One worker (an OS thread) runs one block at a time. The block's threads take turns on it: each runs until it waits,
// and then hands over to the next that can run. When none can, the block is stuck and the launch is over: what each
// thread waits for is known, so a mistake ends in a report and never in a hang.
#define CPU_RUNTIME
#include "shim.h"
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#ifdef __APPLE__
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif
#ifndef MAP_STACK
#define MAP_STACK 0
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

using namespace cpu;

PER_WORKER uint3 threadIdx, blockIdx, blockDim, gridDim;
PER_WORKER char *cpu::arena, *cpu::dynamic_arena;
PER_WORKER Worker *cpu::worker;

// -- the switch from one fiber to another --

// Saves what the calling convention lets a function keep, changes the stack, and returns on the other one.
#if defined(__x86_64__)
void switch_stack(void **save, void *load) __asm__("cpu_switch_stack");
__asm__(R"(
    .text
cpu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void *first_frame(Thread &, char *top, void (*start)())
{
    void **sp = (void **)top - 8;      // six registers, the address to return to, and 8 bytes to align the stack
    std::fill(sp, sp + 8, nullptr);
    sp[6] = (void *)start;
    return sp;
}
#elif defined(__aarch64__)
void switch_stack(void **save, void *load) __asm__("cpu_switch_stack");
__asm__(R"(
    .text
    .p2align 2
cpu_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
static void *first_frame(Thread &, char *top, void (*start)())
{
    void **sp = (void **)top - 20;
    std::fill(sp, sp + 20, nullptr);
    sp[11] = (void *)start;            // x30, the link register
    return sp;
}
#else                                  // anywhere else: the C library's switch, twenty times slower
static void switch_stack(void **save, void *load)
{
    ucontext_t here;
    *save = &here;
    swapcontext(&here, (ucontext_t *)load);
}
static void *first_frame(Thread &t, char *top, void (*start)())
{
    ucontext_t *c = (ucontext_t *)(top - sizeof(ucontext_t));
    getcontext(c);
    c->uc_stack.ss_sp = t.stack;
    c->uc_stack.ss_size = (char *)c - t.stack;
    c->uc_link = nullptr;
    makecontext(c, start, 0);
    return c;
}
#endif

// -- the launch --

static struct {
    Launch config;
    std::vector<std::thread> workers;
    std::vector<pthread_t> ids;
    std::mutex mutex;                          // guards running, findings, standing
    std::condition_variable finished;
    int running;
    std::deque<Finding> findings;
    std::vector<Standing> standing;            // where the threads of the block that failed first stood
    std::atomic<int64_t> next_block, done;
    std::atomic<bool> stop;
    struct sigaction before[4];
} launch;

static SharedSlot *shared_slots;

SharedSlot::SharedSlot(int id, size_t size, size_t element, size_t align)
    : id(id), size(size), element(element), align(align), offset(0), next(shared_slots)
{
    shared_slots = this;
}

// -- reports --

static constexpr size_t STACK = 256 << 10, GUARD = 64 << 10;

static void stand(Worker &w)
{
    if (!launch.standing.empty()) return;
    for (int i = 0; i < w.n; ++i) {
        Thread &t = w.threads[i];
        if (t.state == DONE) continue;
        launch.standing.push_back({i, t.state, &t == w.self && t.state == READY, t.here});
    }
}

static bool on_fiber(Worker &w, uintptr_t sp) { return sp - (uintptr_t)w.stacks < w.stacks_size; }

// Ends the launch from within a fiber: its block is abandoned where it stands.
[[noreturn]] static void abandon(Worker &w)
{
    void *nowhere;
    w.busy = 0;
    switch_stack(&nowhere, w.main_sp);
    __builtin_unreachable();
}

Finding cpu::finding(Kind kind, Place here, Place there)
{
    Finding f = {};
    Worker &w = *worker;
    f.kind = kind, f.here = here, f.there = there, f.array = -1, f.count = 1;
    f.block = f.other_block = w.block, f.thread = w.self ? w.self->index : 0, f.other_thread = -1;
    return f;
}

Finding &cpu::report(const Finding &f)
{
    std::lock_guard<std::mutex> lock(launch.mutex);
    launch.findings.push_back(f);
    if (f.fatal) {
        stand(*worker);
        launch.stop = true;
    }
    return launch.findings.back();
}

[[noreturn]] void cpu::fail(Finding f)
{
    worker->busy = 1;
    f.fatal = 1;
    report(f);
    abandon(*worker);
}

void cpu::trap(const char *what, const char *file, int line)
{
    Finding f = finding(TRAP, {file, line, 0});
    snprintf(f.note, sizeof f.note, "%s", what);
    fail(f);
}

// -- threads take turns --

static inline void run(Worker &w, Thread &next)
{
    Thread *self = w.self;
    w.self = &next;
    threadIdx = next.threadIdx;
    switch_stack(&self->sp, next.sp);
}

// No thread can run: some wait at the block's barrier and the others for lanes that never come.
[[noreturn]] static void stuck(Worker &w)
{
    Thread *at_barrier = nullptr, *in_warp = nullptr;
    for (int i = w.n; i--;) {
        if (w.threads[i].state == AT_BARRIER) at_barrier = &w.threads[i];
        if (w.threads[i].state == IN_WARP) in_warp = &w.threads[i];
    }
    Thread *t = in_warp ? in_warp : at_barrier;
    Finding f = finding(DEADLOCK, t->here, in_warp && at_barrier ? at_barrier->here : Place());
    f.thread = t->index;
    f.other_thread = in_warp && at_barrier ? at_barrier->index : -1;
    fail(f);
}

static void hand_over(Worker &w)
{
    int self = w.self->index, i = self;
    do {
        if (++i == w.n) i = 0;
        if (w.threads[i].state == READY) {
            if (i != self) run(w, w.threads[i]);
            return;
        }
    } while (i != self);
    stuck(w);
}

void cpu::yield() { hand_over(*worker); }
#ifndef CPU_TRACE
void cpu::fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#endif

int cpu::barrier(int vote, const char *file, int line)
{
    Worker &w = *worker;
    Thread &t = *w.self;
    t.here = {file, line, 0};
    if (w.arrived == 0) w.first = &t, w.votes = 0;
    else if (line != w.first->here.line || (file != w.first->here.file && strcmp(file, w.first->here.file))) {
        Finding f = finding(DIVERGENT_BARRIER, t.here, w.first->here);
        f.other_thread = w.first->index;
        fail(f);
    }
    if (w.exited) {
        Finding f = finding(EARLY_RETURN, t.here);
        f.other_thread = w.last_exit;
        fail(f);
    }
    w.votes += vote;
    if (++w.arrived < w.n) {
        t.state = AT_BARRIER;
        hand_over(w);
    } else {
        w.arrived = 0;
        w.result = w.votes;
        for (int i = 0; i < w.n; ++i) w.threads[i].state = READY;
        trace_barrier(w);
    }
    return w.result;
}

// -- warps --

unsigned cpu::active_lanes() { return worker->warps[worker->self->index / 32].alive; }

static void complete(Worker &w, int warp, unsigned mask)
{
    Warp &p = w.warps[warp];
    unsigned need = mask & p.alive;            // CUDA waits only for lanes that have not exited
    if (!need || (p.waiting & need) != need) return;
    Thread *lane = &w.threads[warp * 32], *first = &lane[__builtin_ctz(need)];
    void *mine[32];
    for (unsigned m = need; m; m &= m - 1) {
        Thread &t = lane[__builtin_ctz(m)];
        mine[&t - lane] = t.mine;
        if (t.mask != first->mask) return;     // not the same group: perhaps it is completed by another
        if (t.all != first->all || t.here.line != first->here.line) {
            Finding f = finding(DIVERGENT_WARP, t.here, first->here);
            f.thread = t.index, f.other_thread = first->index;
            fail(f);
        }
    }
    if (first->all) first->all(mine, need);
    trace_warp(w, warp, need, first->flags);
    p.waiting &= ~need;
    for (unsigned m = need; m; m &= m - 1) lane[__builtin_ctz(m)].state = READY;
}

void cpu::warp_collective(unsigned mask, void *mine, Together all, int flags, const char *file, int line)
{
    Worker &w = *worker;
    Thread &t = *w.self;
    int warp = t.index / 32;
    unsigned bit = 1u << t.index % 32;
    t.here = {file, line, 0};
    if (!(mask & bit)) {
        Finding f = finding(NOT_IN_MASK, t.here);
        snprintf(f.note, sizeof f.note, "0x%08x", mask);
        fail(f);
    }
    t.mask = mask, t.mine = mine, t.all = all, t.flags = flags;
    t.state = IN_WARP;
    w.warps[warp].waiting |= bit;
    complete(w, warp, mask);
    if (t.state == IN_WARP) hand_over(w);
}

// -- a thread's life --

static void thread_main()
{
    launch.config.entry(launch.config.args);

    Worker &w = *worker;
    Thread &t = *w.self;
    t.state = DONE;
    w.last_exit = t.index;
    if (w.arrived) {
        Finding f = finding(EARLY_RETURN, w.first->here);
        f.thread = w.first->index, f.other_thread = t.index;
        fail(f);
    }
    int warp = t.index / 32;
    Warp &p = w.warps[warp];
    p.alive &= ~(1u << t.index % 32);
    for (unsigned m = p.waiting; m; m &= m - 1) complete(w, warp, w.threads[32 * warp + __builtin_ctz(m)].mask);
    if (!p.alive) trace_warp_end(w, warp);
    if (++w.exited == w.n) {
        void *nowhere;
        switch_stack(&nowhere, w.main_sp);
    }
    hand_over(w);
    __builtin_unreachable();
}

static void run_block(Worker &w, int64_t block)
{
    const Launch &c = launch.config;
    w.block = block;
    w.arrived = w.exited = 0;
    int64_t x = c.grid[0], y = c.grid[1];
    blockIdx = {unsigned(block % x), unsigned(block / x % y), unsigned(block / x / y)};
    memset(arena, 0xFF, c.arena_bytes);        // NaN: what is read before it is written shows
    for (int i = 0; i < w.n; ++i) {
        Thread &t = w.threads[i];
        t.state = READY;
        t.here = {};
        t.sp = first_frame(t, t.stack + STACK - i * 1088 % 16384, thread_main);      // staggered over the cache
    }
    for (Warp &p : w.warps) p = {~0u, 0};
    if (w.n % 32) w.warps.back().alive = (1u << w.n % 32) - 1;
    trace_block(w);
    w.self = &w.threads[0];
    threadIdx = w.self->threadIdx;
    switch_stack(&w.main_sp, w.self->sp);
    w.self = nullptr;
}

// The zone behind each shared array still holds what it was filled with, or somebody wrote past the array's end.
static void check_zones()
{
    const Launch &c = launch.config;
    auto check = [&](int id, size_t end) {
        for (size_t i = end; i < end + ZONE; ++i)
            if (arena[i] != (char)0xFF) {
                Finding f = finding(PAST_THE_END, Place());
                f.array = id, f.offset = i, f.fatal = 1;
                report(f);
                return;
            }
    };
    for (SharedSlot *s = shared_slots; s; s = s->next)
        if (s->offset) check(s->id, s->offset + s->size);
    if (c.dynamic_bytes) check(DYNAMIC, c.dynamic_offset + c.dynamic_bytes);
}

static void work()
{
    const Launch &c = launch.config;
    Worker w;
    worker = &w;
    w.n = c.block[0] * c.block[1] * c.block[2];
    w.warps.resize((w.n + 31) / 32);
    w.threads.resize(w.n);
    w.stacks_size = w.n * (STACK + GUARD);
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE;
    w.stacks = (char *)mmap(nullptr, w.stacks_size, PROT_READ | PROT_WRITE, kind, -1, 0);
    bool able = w.stacks != MAP_FAILED;
    std::vector<char> memory(c.arena_bytes + 1024), signal_stack(64 << 10);
    arena = (char *)(((uintptr_t)memory.data() + 1023) & ~(uintptr_t)1023);
    dynamic_arena = arena + c.dynamic_offset;
    blockDim = {c.block[0], c.block[1], c.block[2]};
    gridDim = {c.grid[0], c.grid[1], c.grid[2]};
    for (unsigned i = 0; able && i < (unsigned)w.n; ++i) {
        Thread &t = w.threads[i];
        t.index = i;
        t.threadIdx = {i % c.block[0], i / c.block[0] % c.block[1], i / c.block[0] / c.block[1]};
        t.stack = w.stacks + i * (STACK + GUARD) + GUARD;
        mprotect(t.stack - GUARD, GUARD, PROT_NONE);
    }
    // A fault may be a stack overflow, so its handler needs a stack of its own. All other signals are Python's.
    stack_t alternative = {}, none = {};
    alternative.ss_sp = signal_stack.data(), alternative.ss_size = signal_stack.size();
    none.ss_flags = SS_DISABLE;
    sigaltstack(&alternative, nullptr);
    sigset_t block;
    sigfillset(&block);
    for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGURG}) sigdelset(&block, s);
    pthread_sigmask(SIG_SETMASK, &block, nullptr);

    int64_t blocks = (int64_t)c.grid[0] * c.grid[1] * c.grid[2], b;
    trace_start(w);
    while (able && !launch.stop && (b = launch.next_block++) < blocks) {
        run_block(w, b);
        if (!launch.stop) check_zones();
        if (!launch.stop) ++launch.done;
    }
    trace_end(w);

    sigaltstack(&none, nullptr);
    if (able) munmap(w.stacks, w.stacks_size);
    worker = nullptr;
    std::lock_guard<std::mutex> lock(launch.mutex);
    if (--launch.running == 0) launch.finished.notify_all();
}

// -- faults, and the stop of a thread that never waits --

#ifdef CPU_TRACE
constexpr int PATIENCE = 3;
#else
constexpr int PATIENCE = 1;
#endif
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGURG};

static void on_signal(int signal, siginfo_t *info, void *context)
{
    ucontext_t *u = (ucontext_t *)context;
#if defined(__linux__) && defined(__x86_64__)
    uintptr_t pc = u->uc_mcontext.gregs[REG_RIP], sp = u->uc_mcontext.gregs[REG_RSP];
#elif defined(__linux__) && defined(__aarch64__)
    uintptr_t pc = u->uc_mcontext.pc, sp = u->uc_mcontext.sp;
#elif defined(__APPLE__) && defined(__x86_64__)
    uintptr_t pc = u->uc_mcontext->__ss.__rip, sp = u->uc_mcontext->__ss.__rsp;
#elif defined(__APPLE__) && defined(__aarch64__)
    uintptr_t pc = u->uc_mcontext->__ss.__pc, sp = u->uc_mcontext->__ss.__sp;
#else
    uintptr_t pc = 0, sp = (uintptr_t)&u;
#endif
    Worker *w = worker;
    bool fiber = w && w->self && on_fiber(*w, sp);
    if (signal == SIGURG) {
        // Asked again a little later. The detector stops by itself at the next access, which has a line.
        if (!fiber || w->busy || !launch.stop || ++w->asked < PATIENCE) return;
        w->self->here = {nullptr, 0, pc};
        {
            std::lock_guard<std::mutex> lock(launch.mutex);
            stand(*w);
        }
        abandon(*w);
    }
    if (!fiber) {                                             // not ours: let it happen again under the old handler
        for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &launch.before[i], nullptr);
        return;
    }
    w->self->here = {nullptr, 0, pc};
    uintptr_t address = (uintptr_t)info->si_addr;
    bool guard = on_fiber(*w, address) && (address - (uintptr_t)w->stacks) % (STACK + GUARD) < GUARD;
    Finding f = finding(signal == SIGFPE ? DIVISION : guard ? STACK_OVERFLOW : FAULT, w->self->here);
    f.offset = address;
    fail(f);
}

// -- what Python calls --

#pragma GCC visibility push(default)
extern "C" {

void cpu_start(const Launch *config, int workers)
{
    launch.config = *config;
    launch.findings.clear();
    launch.standing.clear();
    launch.next_block = launch.done = 0;
    launch.stop = false;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &launch.before[i]);
    std::lock_guard<std::mutex> lock(launch.mutex);
    try {
        for (launch.running = 0; launch.running < workers; ++launch.running) {
            launch.workers.emplace_back(work);
            launch.ids.push_back(launch.workers.back().native_handle());
        }
    } catch (const std::system_error &) {}             // no more threads to be had: fewer will do
}

// Waits at most that long; 1 when the launch is over. Between two calls Python sees Ctrl-C and looks at the clock.
int cpu_wait(double seconds)
{
    {
        std::unique_lock<std::mutex> lock(launch.mutex);
        if (launch.stop)
            for (pthread_t id : launch.ids) pthread_kill(id, SIGURG);
        std::chrono::duration<double> at_most(seconds);
        if (!launch.finished.wait_for(lock, at_most, [] { return launch.running == 0; })) return 0;
    }
    for (std::thread &t : launch.workers) t.join();
    launch.workers.clear();
    launch.ids.clear();
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &launch.before[i], nullptr);
    return 1;
}

void cpu_stop() { launch.stop = true; }
int64_t cpu_done() { return launch.done; }

int cpu_finding(int i, Finding *f)
{
    if (i >= (int)launch.findings.size()) return 0;
    *f = launch.findings[i];
    return 1;
}

int cpu_standing(int i, Standing *s)
{
    if (i >= (int)launch.standing.size()) return 0;
    *s = launch.standing[i];
    return 1;
}

int cpu_shared(int i, int *id, int64_t *size, int64_t *element, int64_t *align)
{
    SharedSlot *s = shared_slots;
    for (; s && i; --i) s = s->next;
    if (!s) return 0;
    *id = s->id, *size = s->size, *element = s->element, *align = s->align;
    return 1;
}

void cpu_place(int i, int64_t offset)
{
    SharedSlot *s = shared_slots;
    for (; i; --i) s = s->next;
    s->offset = offset;
}

void *cpu_base()       // where this library lies: addr2line wants program counters relative to it
{
    Dl_info info;
    return dladdr((void *)cpu_base, &info) ? info.dli_fbase : nullptr;
}

}
#pragma GCC visibility pop
