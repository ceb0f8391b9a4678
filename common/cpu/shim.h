// The CUDA language on a CPU: what a .cu file may say, for g++ or clang++.
//
// A kernel's source is compiled behind this header, unchanged but for its __shared__ declarations (rewrite.py). CUDA
// threads are fibers: a thread runs alone until it waits at a barrier or a warp operation (runtime.cpp).
// With CPU_TRACE defined every access to memory is reported as well (trace.cpp).
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <type_traits>
#include <utility>

// -- words of the language --

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

#ifdef CPU_TRACE     // one OS thread runs everything: no thread-local storage, and no cost for it
#define PER_WORKER
#define UNTRACED __attribute__((noinline, no_sanitize("thread")))   // noinline keeps the caller's line
#else
#define PER_WORKER __thread
#define UNTRACED inline
#endif
#ifdef CPU_RUNTIME
#define READ_ONLY
#else
#define READ_ONLY const
#endif

// Where a barrier or warp operation stands in the .cu file: default arguments are evaluated at the call.
#define HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// -- vector types --

// g++ splits the copy of a float4 into four reads before it instruments them. In trace mode a copy is therefore a
// function of its own, which reports one read and one write of the whole vector.
#ifdef CPU_TRACE
namespace cpu { void copied(void *to, const void *from, int size, void *caller); }
#define COPY_OF(v) (cpu::copied(this, &v, sizeof v, __builtin_return_address(0)), __builtin_memcpy(this, &v, sizeof v))
#define VECTOR(T, E, bytes, members, init, ...)                                                                        \
    struct alignas(bytes) T {                                                                                          \
        E members;                                                                                                     \
        T() = default;                                                                                                 \
        constexpr T(__VA_ARGS__) : init {}                                                                             \
        UNTRACED T(const T &v) { COPY_OF(v); }                                                                         \
        UNTRACED T &operator=(const T &v) { COPY_OF(v); return *this; }                                                \
    };
#else
#define VECTOR(T, E, bytes, members, init, ...) struct alignas(bytes) T { E members; };
#endif
#define LIST(...) __VA_ARGS__
#define VECTORS(name, E)                                                                                               \
    struct name##1 { E x; };                                                                                           \
    struct name##3 { E x, y, z; };                                                                                     \
    VECTOR(name##2, E, 2 * sizeof(E), LIST(x, y), LIST(x(x), y(y)), E x, E y = 0)                                      \
    VECTOR(name##4, E, sizeof(E) < 8 ? 4 * sizeof(E) : 16, LIST(x, y, z, w), LIST(x(x), y(y), z(z), w(w)),             \
           E x, E y = 0, E z = 0, E w = 0)                                                                             \
    inline name##2 make_##name##2(E x, E y) { return {x, y}; }                                                         \
    inline name##3 make_##name##3(E x, E y, E z) { return {x, y, z}; }                                                 \
    inline name##4 make_##name##4(E x, E y, E z, E w) { return {x, y, z, w}; }
VECTORS(char, signed char)
VECTORS(uchar, unsigned char)
VECTORS(short, short)
VECTORS(ushort, unsigned short)
VECTORS(int, int)
VECTORS(uint, unsigned)
VECTORS(longlong, long long)
VECTORS(ulonglong, unsigned long long)
VECTORS(float, float)
VECTORS(double, double)
// The 16-bit floating types (half, half2, __nv_bfloat16) belong here.

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// -- who am I --

// Constant as long as a thread lives: the compiler may keep them in registers across a barrier.
extern PER_WORKER READ_ONLY uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// -- shared memory --

namespace cpu {
    extern PER_WORKER char *arena;             // the shared memory of the block that this OS thread runs
    extern PER_WORKER char *dynamic_arena;     // its `extern __shared__` part

    struct SharedSlot {                        // one __shared__ declaration; Python reads the list and sets the offsets
        int id;
        size_t size, element, align, offset;
        SharedSlot *next;
        SharedSlot(int id, size_t size, size_t element, size_t align);
    };
    template <class T, int Id, size_t Align> struct SharedVariable { static SharedSlot slot; };
    template <class T, int Id, size_t Align> SharedSlot SharedVariable<T, Id, Align>::slot(
        Id, sizeof(T), sizeof(std::remove_all_extents_t<T>), Align > alignof(T) ? Align : alignof(T));

    template <class T, int Id, size_t Align> T &shared()
    {
        return *(T *)(arena + SharedVariable<T, Id, Align>::slot.offset);
    }
}

// -- barriers --

namespace cpu {
    int barrier(int vote, const char *file, int line);      // the sum of the votes of all threads of the block
    void yield();
    void fence();
    [[noreturn]] void trap(const char *what, const char *file, int line);
}
inline void __syncthreads(HERE) { cpu::barrier(0, file, line); }
inline int __syncthreads_count(int p, HERE) { return cpu::barrier(p != 0, file, line); }
inline int __syncthreads_or(int p, HERE) { return cpu::barrier(p != 0, file, line) > 0; }
inline int __syncthreads_and(int p, HERE) { return cpu::barrier(p == 0, file, line) == 0; }
inline void __threadfence() { cpu::fence(); }
inline void __threadfence_block() { cpu::fence(); }
inline void __nanosleep(unsigned) { cpu::yield(); }
inline void __trap(HERE) { cpu::trap("__trap()", file, line); }
#undef assert
#define assert(e) ((e) ? (void)0 : cpu::trap("assert(" #e ")", __FILE__, __LINE__))

// -- warp operations --

// Every lane in `mask` deposits what it brings and waits; the last to come computes for all. Any instruction that a
// warp executes together (shuffle, vote, mma, ldmatrix) is a few lines on top of this.
namespace cpu {
    typedef void (*Together)(void **lanes, unsigned active);     // active: bit i is set where lanes[i] takes part
    constexpr int SYNCWARP = 1;                                  // orders memory, which a shuffle does not
    void warp_collective(unsigned mask, void *mine, Together all, int flags, const char *file, int line);
    unsigned active_lanes();
    inline int lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }

    template <class T> T shuffle(unsigned mask, T value, int source, const char *file, int line)
    {
        struct Lane { T value, result; int source; } mine{value, value, source};
        warp_collective(mask, &mine, [](void **all, unsigned active) {
            Lane **lanes = (Lane **)all;
            for (int i = 0; i < 32; ++i) {
                if (!(active >> i & 1)) continue;
                int from = lanes[i]->source;
                if (active >> from & 1) lanes[i]->result = lanes[from]->value;
                else memset((void *)&lanes[i]->result, 0xFF, sizeof(T));        // undefined in CUDA; NaN here
            }
        }, 0, file, line);
        return mine.result;
    }

    template <class F, class T> T reduce(unsigned mask, T mine, const char *file, int line)
    {
        warp_collective(mask, &mine, [](void **all, unsigned active) {
            T **lanes = (T **)all, sum = *lanes[__builtin_ctz(active)];
            for (unsigned m = active & (active - 1); m; m &= m - 1) sum = F()(sum, *lanes[__builtin_ctz(m)]);
            for (unsigned m = active; m; m &= m - 1) *lanes[__builtin_ctz(m)] = sum;
        }, 0, file, line);
        return mine;
    }
    struct Add { template <class T> T operator()(T a, T b) { return a + b; } };
    struct Min { template <class T> T operator()(T a, T b) { return b < a ? b : a; } };
    struct Max { template <class T> T operator()(T a, T b) { return a < b ? b : a; } };
    struct And { template <class T> T operator()(T a, T b) { return a & b; } };
    struct Or  { template <class T> T operator()(T a, T b) { return a | b; } };
    struct Xor { template <class T> T operator()(T a, T b) { return a ^ b; } };
}
inline void __syncwarp(unsigned mask = ~0u, HERE)
{
    cpu::warp_collective(mask, nullptr, nullptr, cpu::SYNCWARP, file, line);
}
inline unsigned __activemask() { return cpu::active_lanes(); }

// The second argument of cpu::shuffle is the lane to read; a lane whose source lies outside its segment reads itself.
#define SHUFFLE(name, By, from, inside)                                                                                \
    template <class T> T name(unsigned mask, T value, By by, int width = 32, HERE)                                     \
    {                                                                                                                  \
        int lane = cpu::lane(), first = lane & -width, last = lane | (width - 1), source = from;                       \
        return cpu::shuffle(mask, value, inside ? source : lane, file, line);                                          \
    }
SHUFFLE(__shfl_sync, int, first | (by & (width - 1)), true)
SHUFFLE(__shfl_up_sync, unsigned, lane - (int)by, source >= first)
SHUFFLE(__shfl_down_sync, unsigned, lane + (int)by, source <= last)
SHUFFLE(__shfl_xor_sync, int, lane ^ by, source <= last)

inline unsigned __ballot_sync(unsigned mask, int p, HERE)
{
    return cpu::reduce<cpu::Or>(mask, p ? 1u << cpu::lane() : 0u, file, line);
}
inline int __any_sync(unsigned mask, int p, HERE) { return cpu::reduce<cpu::Or>(mask, int(p != 0), file, line); }
inline int __all_sync(unsigned mask, int p, HERE) { return cpu::reduce<cpu::And>(mask, int(p != 0), file, line); }
#define REDUCE(name, F)                                                                                                \
    template <class T> T name(unsigned mask, T v, HERE) { return cpu::reduce<cpu::F>(mask, v, file, line); }
REDUCE(__reduce_add_sync, Add)
REDUCE(__reduce_min_sync, Min)
REDUCE(__reduce_max_sync, Max)
REDUCE(__reduce_and_sync, And)
REDUCE(__reduce_or_sync, Or)
REDUCE(__reduce_xor_sync, Xor)

// -- atomics --

namespace cpu {
    template <class T> struct same { typedef T type; };       // keeps `atomicAdd(&f, 1)` from deducing T twice
#ifdef CPU_TRACE
    void atomic(void *p, int size, void *caller);
    template <class T, class F> UNTRACED T update(T *p, F f, void *caller)
    {
        atomic(p, sizeof(T), caller);
        T old = *p;
        *p = f(old);
        return old;
    }
#define CALLER __builtin_return_address(0)
#else
    template <class T, class F> T update(T *p, F f, void *)
    {
        T old, now;
        __atomic_load(p, &old, __ATOMIC_RELAXED);
        do now = f(old);
        while (!__atomic_compare_exchange(p, &old, &now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return old;
    }
#define CALLER nullptr
#endif
}
#define ATOMIC(name, now)                                                                                              \
    template <class T> UNTRACED T name(T *p, typename cpu::same<T>::type v)                                            \
    {                                                                                                                  \
        return cpu::update(p, [v](T old) -> T { return now; }, CALLER);                                                \
    }
ATOMIC(atomicAdd, old + v)
ATOMIC(atomicSub, old - v)
ATOMIC(atomicExch, v)
ATOMIC(atomicMin, v < old ? v : old)
ATOMIC(atomicMax, v > old ? v : old)
ATOMIC(atomicAnd, old & v)
ATOMIC(atomicOr, old | v)
ATOMIC(atomicXor, old ^ v)
ATOMIC(atomicInc, old >= v ? 0 : old + 1)
ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T> UNTRACED T atomicCAS(T *p, typename cpu::same<T>::type expected, typename cpu::same<T>::type v)
{
    return cpu::update(p, [=](T old) -> T { return old == expected ? v : old; }, CALLER);
}

// -- arithmetic --

// As on the GPU, a NaN loses against a number. (The C library's fmaxf is a call; this is two instructions.)
namespace cpu {
    template <class T> constexpr T larger(T a, T b) { return a > b || b != b ? a : b; }
    template <class T> constexpr T smaller(T a, T b) { return a < b || b != b ? a : b; }
}
template <class A, class B> constexpr auto max(A a, B b) { return cpu::larger<std::common_type_t<A, B>>(a, b); }
template <class A, class B> constexpr auto min(A a, B b) { return cpu::smaller<std::common_type_t<A, B>>(a, b); }
#define fmaxf(a, b) cpu::larger<float>(a, b)
#define fminf(a, b) cpu::smaller<float>(a, b)

inline float __expf(float x) { return exp2f(x * 1.44269504f); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __saturatef(float a) { return a > 0 ? (a < 1 ? a : 1) : 0; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float fdividef(float a, float b) { return a / b; }
namespace cpu {
    template <class To, class From> inline To bits(From v)
    {
        To r;
        memcpy(&r, &v, sizeof r);
        return r;
    }
}
inline int __float_as_int(float x) { return cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bits<float>(x); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline void __stcs(T *p, T v) { *p = v; }

// -- the entry: what Python calls, with the argument types as C++ deduces them --

#ifndef CPU_RUNTIME
namespace cpu {
    // A type as Python reads it: "f4" float, "i4" int, "x16" other, of 16 bytes, "*f4" float *, "*cf4" const float *.
    template <class T> int spell(char *s)
    {
        typedef std::remove_pointer_t<T> E;
        char kind = std::is_floating_point_v<E> ? 'f' : std::is_integral_v<E> ? 'i' : std::is_void_v<E> ? 'v' : 'x';
        int size = 1;
        if constexpr (!std::is_void_v<E>) size = sizeof(E);
        return sprintf(s, "%s%s%c%d ", std::is_pointer_v<T> ? "*" : "", std::is_const_v<E> ? "c" : "", kind, size);
    }
    template <class... A> void spell_all(void (*)(A...), char *s) { *s = 0, ((s += spell<A>(s)), ...); }

    template <class... A, size_t... I> __attribute__((no_sanitize("thread")))
    void call(void (*kernel)(A...), void **args, std::index_sequence<I...>)
    {
        kernel(*(std::remove_reference_t<A> *)args[I]...);
    }
    template <class... A> __attribute__((no_sanitize("thread"))) void call(void (*kernel)(A...), void **args)
    {
        call(kernel, args, std::index_sequence_for<A...>());
    }
}
#define CPU_EXPORT extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
#define CPU_ENTRY(i, ...)                                                                                              \
    CPU_EXPORT void cpu_entry_##i(void **args) { cpu::call(__VA_ARGS__, args); }                                       \
    CPU_EXPORT void cpu_signature_##i(char *s) { cpu::spell_all(__VA_ARGS__, s); }
#endif
