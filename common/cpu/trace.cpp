// The detector of trace mode: sees every access of the kernel before it happens.
//
// The kernel is compiled with -fsanitize=thread, which calls __tsan_read4(address) and the like before each access; the
// functions of that name are ours. From (address, size, return address) follow bounds, alignment, reads of what nobody
// wrote, races, and the counts of each source line. Compiled together with runtime.cpp and not instrumented itself. One
// OS thread runs it all, so blocks run one after the other.
#ifdef __linux__
#include <link.h>
#endif
#include <map>
#include <tuple>

namespace cpu {

enum Space : int { GLOBAL, SHARED };
enum Op : int { LOAD, STORE, ATOMIC };

// -- what is watched --

// What is known of one cell (4 bytes; fewer where the kernel makes narrower accesses): its last write and its last
// read, each with the thread's clock. MANY stands for several unordered readers, which `readers` then lists.
constexpr uint16_t MANY = 0x7fff, ATOMICALLY = 0x8000;
struct Cell {
    uint32_t written, read;                        // clocks, 0: never
    uint16_t write_site, read_site, writer, reader;
};
struct Reader { uint32_t clock, site; };
struct Between {                                   // a cell of global memory, as the other blocks see it
    int writer = -1, reader = -1, other_reader = -1;
    uint16_t other_site = 0;
};

struct Array {
    char *base;
    size_t size;
    int space, number;
    bool racy;                                     // false for global arrays that the kernel cannot write
    Cell *cells;
    Reader *readers;                               // [thread][cell], touched only where several threads read a cell
    std::vector<Between> between;
    size_t count;
};

// A request of one warp, costed: 32-byte sectors of global memory, or wavefronts through the 32 banks of shared memory.
struct Request {
    uint32_t lanes, offset[32];                    // which lanes took part; offsets from the start of the space
    int cost, ideal;
};

// One instruction of the kernel: a return address, and whether it loads or stores. (Counts: what Python reads.)
struct Counts {
    uintptr_t pc;
    int op, space, size;
    uint64_t arrays;                               // bit set of those that it touched
    int64_t requests, bytes, cost, ideal;
    Request first, worst;                          // the fullest, and the most wasteful
};
struct Site : Counts {
    int index;
    Array *last = nullptr;                         // the array that it touched last
    Request known[8] = {};                         // the latest of each alignment: most look like the one before
    std::vector<std::vector<uint32_t>> visits;     // [thread]: offsets since the warp's lanes were last matched
};

struct Watched { int space, writable; int64_t base, size; };

std::vector<Watched> watched;
char *heap;
size_t heap_size;
int granule = 2, finer = -1;                       // log2 of a cell's bytes; what it should have been

std::deque<Array> arrays;
std::deque<Site> sites;
std::map<std::tuple<uintptr_t, int, int>, Site *> site_of;
Site *quick[4096];                                 // by pc and op, whatever the space
std::map<std::tuple<int, int, int>, Finding *> seen;

char *image, *image_end;
int threads;

// -- what is ordered before what --

// Vector clocks, with a floor. Clocks only grow. At a block's barrier every thread takes the same new clock, the floor:
// what is older than the floor is ordered before everything that follows. Between barriers `knows[t][u]` is the latest
// clock of u that t is ordered after (through __syncwarp).
uint32_t top, floor_, block_floor;
std::vector<uint32_t> clock_, knows;
std::vector<char> fenced;                          // the thread has executed __threadfence
std::vector<uint32_t> published;                   // [block]: its clock when an atomic followed a fence
bool acquired;                                     // this block has since made an atomic: it sees what was published

// Is what u did at `clock` ordered before what t does now?
inline bool ordered(int u, uint32_t clock, int t)
{
    return clock < floor_ || u == t || clock <= knows[(size_t)t * threads + u];
}

template <class T> T *zeroed(size_t count)
{
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return (T *)mmap(nullptr, count * sizeof(T) + 1, PROT_READ | PROT_WRITE, kind, -1, 0);
}

// -- findings --

Finding &once(Kind kind, Site &site, int other, Array *array, size_t offset)
{
    Finding *&known = seen[{kind, site.index, other}];
    if (known) {
        ++known->count;
        return *known;
    }
    Finding f = finding(kind, {nullptr, 0, site.pc}, {nullptr, 0, other >= 0 ? sites[other].pc : 0});
    f.size = site.size, f.write = site.op, f.other_write = other >= 0 ? sites[other].op : 0;
    if (array) f.array = array->number, f.offset = offset;
    known = &report(f);
    return *known;
}

void race(Site &site, int other_site, int other_thread, Array &a, size_t cell)
{
    Finding &f = once(RACE, site, other_site, &a, cell << granule);
    if (f.count == 1) f.other_thread = other_thread;
}

void race_between(Site &site, int other_site, int other_block, Array &a, size_t cell)
{
    Finding &f = once(RACE_BETWEEN_BLOCKS, site, other_site, &a, cell << granule);
    if (f.count == 1) f.other_block = other_block;
}

// -- races --

inline void on_read(Site &s, Array &a, size_t i, int t)
{
    Cell &c = a.cells[i];
    uint32_t now = clock_[t];
    int writer = c.writer & ~ATOMICALLY;
    if (a.space == SHARED && c.written < block_floor) {
        once(UNINITIALISED, s, -1, &a, i << granule);
    } else if (c.written >= floor_ && !ordered(writer, c.written, t)) {
        race(s, c.write_site, writer, a, i);
    }
    if (c.read < floor_ || (c.reader != MANY && ordered(c.reader, c.read, t))) {
        c.reader = t;                              // whoever is ordered after this read is ordered after that one
    } else {
        if (c.reader != MANY) {
            a.readers[c.reader * a.count + i] = {c.read, c.read_site};
            c.reader = MANY;
        }
        a.readers[t * a.count + i] = {now, (uint32_t)s.index};
    }
    c.read = now > c.read ? now : c.read;
    c.read_site = s.index;
}

inline void on_write(Site &s, Array &a, size_t i, int t)
{
    Cell &c = a.cells[i];
    int writer = c.writer & ~ATOMICALLY;
    bool both_atomic = s.op == ATOMIC && c.writer & ATOMICALLY;
    if (c.written >= floor_ && !both_atomic && !ordered(writer, c.written, t)) race(s, c.write_site, writer, a, i);
    if (c.read >= floor_) {
        if (c.reader != MANY) {
            if (!ordered(c.reader, c.read, t)) race(s, c.read_site, c.reader, a, i);
        } else {
            for (int u = 0; u < threads; ++u) {
                Reader &r = a.readers[u * a.count + i];
                if (!ordered(u, r.clock, t)) {
                    race(s, r.site, u, a, i);
                    break;
                }
            }
        }
    }
    c.written = clock_[t], c.write_site = s.index;
    c.writer = t | (s.op == ATOMIC ? ATOMICALLY : 0);
    c.read = 0;                                    // later accesses are compared with this write: that is enough
}

// Blocks run one after the other here and in any order on a GPU. Only an atomic after a fence orders them.
inline void between_blocks(Site &s, Array &a, size_t i, int block)
{
    Between &b = a.between[i];
    Cell &c = a.cells[i];
    auto hidden = [&](int other, uint32_t clock) { return !(acquired && published[other] >= clock); };
    if (b.writer >= 0 && b.writer != block && !(s.op == ATOMIC && c.writer & ATOMICALLY) && hidden(b.writer, c.written))
        race_between(s, c.write_site, b.writer, a, i);
    if (s.op == LOAD) {
        if (b.reader != block) b.other_reader = b.reader, b.other_site = c.read_site, b.reader = block;
    } else {
        bool mine = b.reader == block;             // then an earlier reader is of interest
        int reader = mine ? b.other_reader : b.reader, reader_site = mine ? b.other_site : c.read_site;
        if (reader >= 0 && hidden(reader, mine ? 0 : c.read)) race_between(s, reader_site, reader, a, i);
        b.writer = block;
    }
}

// -- the cost of a request --

int different(const uint32_t *v, int n)
{
    int count = 0;
    for (int i = 0; i < n; ++i) {
        int j = 0;
        while (j < i && v[j] != v[i]) ++j;
        count += j == i;
    }
    return count;
}

// Global memory moves in sectors of 32 bytes.
void count_sectors(Request &r, int size)
{
    uint32_t sector[64], offset[32];
    int n = 0, m = 0;
    for (int l = 0; l < 32; ++l)
        if (r.lanes >> l & 1) {
            offset[m++] = r.offset[l];
            sector[n++] = r.offset[l] / 32;
            if ((r.offset[l] + size - 1) / 32 != r.offset[l] / 32) sector[n++] = r.offset[l] / 32 + 1;
        }
    r.cost = different(sector, n);
    r.ideal = (different(offset, m) * size + 31) / 32;
}

// Does every lane ask for the same address as its partner, lane ^ by, where both take part?
bool paired(const Request &r, int by)
{
    for (int l = 0; l < 32; ++l)
        if (r.lanes >> l & 1 && r.lanes >> (l ^ by) & 1 && r.offset[l] != r.offset[l ^ by]) return false;
    return true;
}

// Shared memory has 32 banks of 4 bytes; a wavefront takes one word of each, and lanes that want the same word share
// it. Wide accesses go in parts: 8 bytes by half warps, 16 bytes by quarters, and two parts at once if neighbours, or
// neighbours but one, agree in their addresses. The last rule is not NVIDIA's word: it is what 62 patterns cost on an
// H200 (tests/test_nvidia.py).
void count_wavefronts(Request &r, int size)
{
    int lanes_at_once = size == 16 ? 8 : size == 8 ? 16 : 32;
    if (size >= 8 && (paired(r, 1) || paired(r, 2))) lanes_at_once *= 2;
    r.cost = r.ideal = 0;
    for (int part = 0; part < 32; part += lanes_at_once) {
        uint32_t word[32][32];
        int words[32] = {}, most = 0;
        for (int l = part; l < part + lanes_at_once; ++l)
            if (r.lanes >> l & 1)
                for (uint32_t w = r.offset[l] / 4; w <= (r.offset[l] + size - 1) / 4; ++w) {
                    uint32_t *in_bank = word[w % 32];
                    int &n = words[w % 32], j = 0;
                    while (j < n && in_bank[j] != w) ++j;
                    if (j == n) in_bank[n++] = w;
                    if (n > most) most = n;
                }
        r.cost += most;
        r.ideal += most > 0;
    }
}

void count(Site &s, Request &r)
{
    uint32_t origin = r.offset[__builtin_ctz(r.lanes)];
    Request &known = s.known[origin / 4 % 8];
    // The same pattern, moved by whole sectors (or words of equal alignment), costs the same.
    uint32_t shift = known.lanes ? origin - known.offset[__builtin_ctz(known.lanes)] : 0;
    uint32_t differs = (known.lanes ^ r.lanes) | shift % 32;
    for (int l = 0; l < 32; ++l) differs |= ((known.offset[l] + shift) ^ r.offset[l]) & -(r.lanes >> l & 1);
    if (differs) {
        if (s.space == GLOBAL) count_sectors(r, s.size);
        else count_wavefronts(r, s.size);
        known = r;
    } else {
        r.cost = known.cost, r.ideal = known.ideal;
    }
    int lanes = __builtin_popcount(r.lanes);
    s.requests += 1, s.bytes += lanes * s.size, s.cost += r.cost, s.ideal += r.ideal;
    if (lanes > __builtin_popcount(s.first.lanes)) s.first = r;
    if (r.cost - r.ideal > s.worst.cost - s.worst.ideal) s.worst = r;
}

// The lanes of a warp are matched by their k-th visit to an instruction since the last barrier.
void match(int warp)
{
    int begin = warp * 32, end = std::min(threads, begin + 32);
    for (Site &s : sites) {
        size_t most = 0;
        for (int t = begin; t < end; ++t) most = std::max(most, s.visits[t].size());
        if (!most) continue;
        const uint32_t *visits[32];
        size_t size[32];
        for (int t = begin; t < end; ++t) visits[t - begin] = s.visits[t].data(), size[t - begin] = s.visits[t].size();
        for (size_t k = 0; k < most; ++k) {
            Request r;
            r.lanes = 0;
            for (int l = 0; l < 32; ++l) {
                bool here = l < end - begin && k < size[l];
                r.lanes |= (uint32_t)here << l;
                r.offset[l] = here ? visits[l][k] : 0;
            }
            count(s, r);
        }
        for (int t = begin; t < end; ++t) s.visits[t].clear();
    }
}

// -- an access --

Site &site(uintptr_t pc, int op, int space, int size)
{
    Site *&s = site_of[{pc, op, space}];
    if (!s) {
        sites.emplace_back();
        s = &sites.back();
        static_cast<Counts &>(*s) = {pc, op, space, size, 0, 0, 0, 0, 0, {}, {}};
        s->index = std::min<size_t>(sites.size() - 1, 0xffff);
        s->visits.resize(threads);
    }
    return *s;
}

// The array of an address; ends the launch if there is none.
__attribute__((noinline)) Site *classify(Worker &w, Site *s, char *p, int size, int op, uintptr_t pc)
{
    int space = (size_t)(p - arena) < launch.config.arena_bytes ? SHARED : GLOBAL;
#ifndef __linux__
    if (space == GLOBAL && (size_t)(p - heap) >= heap_size) return nullptr;      // the library's own, as far as we know
#endif
    Array *before = s ? s->last : nullptr, *nearest = nullptr;
    if (!s || s->space != space) s = &site(pc, op, space, size);
    size_t distance = ~(size_t)0;
    for (Array &a : arrays) {
        if (a.space != space) continue;
        if ((size_t)(p - a.base) <= a.size - size && a.size >= (size_t)size) {
            s->last = &a;
            s->arrays |= 1ull << std::min(a.number, 63);
            return s;
        }
        size_t far = p < a.base ? a.base - p : p - a.base - a.size;
        if (far < distance) nearest = &a, distance = far;
    }
    if (before) nearest = before;                  // the array that this instruction touched last is the likely one
    else if (distance > heap_size) nearest = nullptr;
    Finding f = finding(OUT_OF_BOUNDS, {nullptr, 0, pc});
    f.size = size, f.write = op;
    if (nearest) f.array = nearest->number, f.offset = p - nearest->base;
    w.self->here = {nullptr, 0, pc - 1};
    fail(f);
}

inline void access(void *address, int size, int op, void *caller)
{
    if (!worker) return;                           // the library is being loaded
    Worker &w = *worker;
    char *p = (char *)address;
    if ((size_t)(p - w.stacks) < w.stacks_size || (size_t)(p - image) < (size_t)(image_end - image)) return;
    w.busy = 1;
    uintptr_t pc = (uintptr_t)caller;
    if (launch.stop) {
        w.self->here = {nullptr, 0, pc - 1};
        stand(w);
        abandon(w);
    }
    Site *&slot = quick[(pc * 3 + op) % 4096], *s = slot;
    if (!s || s->pc != pc || s->op != op) s = nullptr;
    if (!s || !s->last || (size_t)(p - s->last->base) > s->last->size - size) {
        s = classify(w, s, p, size, op, pc);
        if (!s) { w.busy = 0; return; }
        slot = s;
    }
    Array &a = *s->last;
    size_t offset = p - a.base;
    if ((uintptr_t)p % size) {
        Finding f = finding(MISALIGNED, {nullptr, 0, pc});
        f.size = size, f.write = op, f.array = a.number, f.offset = offset;
        w.self->here = {nullptr, 0, pc - 1};
        fail(f);
    }
    if (size < 1 << granule) {                     // cells too coarse to tell neighbours apart: again, with finer ones
        finer = __builtin_ctz(size);
        launch.stop = true;
        abandon(w);
    }
    int t = w.self->index;
    if (a.racy)
        for (size_t i = offset >> granule, n = i + (size >> granule); i < n; ++i) {
            if (a.space == GLOBAL) between_blocks(*s, a, i, w.block);
            if (op == STORE) on_write(*s, a, i, t);
            else if (op == LOAD) on_read(*s, a, i, t);
            else {
                if (a.space == SHARED && a.cells[i].written < block_floor)
                    once(UNINITIALISED, *s, -1, &a, i << granule);
                on_write(*s, a, i, t);
            }
        }
    s->visits[t].push_back(p - (a.space == SHARED ? arena : heap));
    if (op == ATOMIC && a.space == GLOBAL) {
        acquired = true;
        if (fenced[t]) published[w.block] = top;
    }
    w.busy = 0;
}

void access_range(void *address, size_t size, int op, void *caller)
{
    int step = ((uintptr_t)address | size) % 4 ? 1 : 4;
    for (size_t i = 0; i < size; i += step) access((char *)address + i, step, op, caller);
}

#ifdef __linux__
int find_image(dl_phdr_info *info, size_t, void *)
{
    char *low = nullptr, *high = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            char *begin = (char *)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            if (!low) low = begin;
            high = begin + info->dlpi_phdr[i].p_memsz;
        }
    if ((char *)&launch < low || (char *)&launch >= high) return 0;
    image = low, image_end = high;
    return 1;
}
#endif

}

// -- the runtime's hooks --

void cpu::trace_start(Worker &w)
{
    threads = w.n;
    top = 0, finer = -1;
    arrays.clear(), sites.clear(), site_of.clear(), seen.clear();
    std::fill(quick, quick + 4096, nullptr);
    clock_.assign(threads, 0), knows.assign((size_t)threads * threads, 0), fenced.assign(threads, 0);
    published.assign((size_t)gridDim.x * gridDim.y * gridDim.z, 0);
    for (size_t i = 0; i < watched.size(); ++i) {
        Watched &v = watched[i];
        arrays.emplace_back();
        Array &a = arrays.back();
        a.space = v.space, a.number = i, a.size = v.size, a.racy = v.writable;
        a.base = v.space == SHARED ? arena + v.base : (char *)v.base;
        a.count = (v.size >> granule) + 1;
        a.cells = a.racy ? zeroed<Cell>(a.count) : nullptr;
        a.readers = a.racy ? zeroed<Reader>(a.count * threads) : nullptr;
        if (a.racy && a.space == GLOBAL) a.between.resize(a.count);
    }
#ifdef __linux__
    dl_iterate_phdr(find_image, nullptr);
#else
    image = image_end = (char *)&launch;
#endif
}

void cpu::trace_block(Worker &)
{
    block_floor = floor_ = ++top;
    std::fill(clock_.begin(), clock_.end(), top);
    std::fill(fenced.begin(), fenced.end(), 0);
    acquired = false;
}

void cpu::trace_barrier(Worker &w)
{
    for (size_t i = 0; i < w.warps.size(); ++i) match(i);
    floor_ = ++top;
    std::fill(clock_.begin(), clock_.end(), top);
}

void cpu::trace_warp(Worker &, int warp, unsigned lanes, int flags)
{
    if (flags != SYNCWARP) return;
    std::vector<uint32_t> all(threads, 0);
    for (unsigned m = lanes; m; m &= m - 1) {
        int t = warp * 32 + __builtin_ctz(m);
        uint32_t *row = &knows[(size_t)t * threads];
        row[t] = clock_[t];
        for (int u = 0; u < threads; ++u) all[u] = std::max(all[u], row[u]);
    }
    for (unsigned m = lanes; m; m &= m - 1) {
        int t = warp * 32 + __builtin_ctz(m);
        std::copy(all.begin(), all.end(), &knows[(size_t)t * threads]);
        top = std::max(top, ++clock_[t]);
    }
}

void cpu::trace_warp_end(Worker &, int warp) { match(warp); }

void cpu::trace_end(Worker &w)
{
    for (size_t i = 0; i < w.warps.size(); ++i) match(i);
    for (Array &a : arrays) {
        if (a.cells) munmap(a.cells, a.count * sizeof(Cell) + 1);
        if (a.readers) munmap(a.readers, a.count * threads * sizeof(Reader) + 1);
    }
}

void cpu::fence() { fenced[worker->self->index] = 1; }
void cpu::atomic(void *p, int size, void *caller) { access(p, size, ATOMIC, caller); }
void cpu::copied(void *to, const void *from, int size, void *caller)
{
    access((void *)from, size, LOAD, caller);
    access(to, size, STORE, caller);
}

// -- what the compiler calls --

#define READ(n) access(p, n, LOAD, __builtin_return_address(0));
#define WRITE(n) access(p, n, STORE, __builtin_return_address(0));
#define ACCESSES(n)                                                                                                    \
    void __tsan_read##n(void *p) { READ(n) }                                                                           \
    void __tsan_write##n(void *p) { WRITE(n) }                                                                         \
    void __tsan_read_write##n(void *p) { READ(n) WRITE(n) }                                                            \
    void __tsan_unaligned_read##n(void *p) { READ(n) }                                                                 \
    void __tsan_unaligned_write##n(void *p) { WRITE(n) }                                                               \
    void __tsan_unaligned_read_write##n(void *p) { READ(n) WRITE(n) }

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *p, size_t n) { access_range(p, n, LOAD, __builtin_return_address(0)); }
void __tsan_write_range(void *p, size_t n) { access_range(p, n, STORE, __builtin_return_address(0)); }
void *__tsan_memset(void *p, int v, size_t n)
{
    access_range(p, n, STORE, __builtin_return_address(0));
    return memset(p, v, n);
}
void *__tsan_memcpy(void *to, const void *from, size_t n)
{
    access_range((void *)from, n, LOAD, __builtin_return_address(0));
    access_range(to, n, STORE, __builtin_return_address(0));
    return memmove(to, from, n);
}
void *__tsan_memmove(void *to, const void *from, size_t n) { return __tsan_memcpy(to, from, n); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

// -- what Python calls --

#pragma GCC visibility push(default)
void cpu_watch(const Watched *list, int n, void *heap_start, size_t size, int log2_granule)
{
    watched.assign(list, list + n);
    heap = (char *)heap_start, heap_size = size, granule = log2_granule;
}
int cpu_finer() { return finer; }

int cpu_site(int i, Counts *out)
{
    if (i >= (int)sites.size()) return 0;
    *out = sites[i];
    return 1;
}
#pragma GCC visibility pop
}
