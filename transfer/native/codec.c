/* The delta codec's native kernels: a plain shared library without Python in it, called through ctypes.
 *
 * Every function exists for 2- and 4-byte elements and for each instruction set that the compiler can target; the
 * caller names one of those that rose_codec_level() says this machine has. Nothing here keeps state, so any number
 * of threads may call at once.
 */
#include <stdlib.h>
#include <string.h>

#include "format.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the streams are little-endian; on such a machine the NumPy kernels are used"
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif

static size_t ahead_bytes(void)
{
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd"))
        return AHEAD_BYTES_AMD;
#endif
    return AHEAD_BYTES;
}

#define SCALAR 0
#define AVX2 1
#define AVX512 2

#define LANE 2
#define BITS 16
#define ELEM uint16_t
#define SIGNED int16_t
#include "isas.h"

#define LANE 4
#define BITS 32
#define ELEM uint32_t
#define SIGNED int32_t
#include "isas.h"

#ifdef X86
#define EACH(call) \
    switch (level * 8 + lane) { \
    case SCALAR * 8 + 2: call(16_scalar); break; \
    case SCALAR * 8 + 4: call(32_scalar); break; \
    case AVX2 * 8 + 2: call(16_avx2); break; \
    case AVX2 * 8 + 4: call(32_avx2); break; \
    case AVX512 * 8 + 2: call(16_avx512); break; \
    case AVX512 * 8 + 4: call(32_avx512); break; \
    }
#else
#define EACH(call) \
    switch (lane) { \
    case 2: call(16_scalar); break; \
    case 4: call(32_scalar); break; \
    }
#endif

/* The layout of these functions; the caller refuses a library that says another. */
int rose_codec_abi(void) { return 1; }

/* The widest instruction set that this machine has. */
int rose_codec_level(void)
{
#ifdef X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
        !__builtin_cpu_supports("popcnt"))
        return SCALAR;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi2"))
        return AVX512;
    return AVX2;
#else
    return SCALAR;
#endif
}

/* Scratch for `count` tiles at once; the widest element decides. */
static void *scratch(int lane, size_t count)
{
    return malloc(count * (lane == 2 ? sizeof(struct scratch_16_scalar) : sizeof(struct scratch_32_scalar)));
}

/* One hash per tile; their sum is the bucket's. */
int rose_codec_hash(int level, int lane, const void *data, uint64_t elements, uint64_t *hashes)
{
    (void)level;
    for (size_t tile = 0; tile * TILE < elements; tile++) {
        const void *at = (const char *)data + tile * TILE * (size_t)lane;
#define CALL(x) hashes[tile] = hash_##x(at, tile_length(elements, tile), tile * TILE)
        EACH(CALL)
#undef CALL
    }
    return SOUND;
}

/* `out` has room for an eighth of the elements in index bytes, and for all elements in values and in escapes. */
int rose_codec_encode(int level, int lane, const void *old, const void *new, uint64_t elements, int overwrite,
                      struct streams *out)
{
    (void)level;
    void *s = scratch(lane, 1);
    if (!s)
        return NO_MEMORY;
#define CALL(x) encode_##x(old, new, elements, overwrite, out, s)
    EACH(CALL)
#undef CALL
    free(s);
    return SOUND;
}

/* The caller has checked that the tiles' sizes add up to those of the streams. `bad` is the tile at fault. */
int rose_codec_inspect(int level, int lane, const struct streams *in, uint64_t elements, int overwrite, uint64_t *bad)
{
    (void)level;
    enum fault fault = SOUND;
    size_t tile = 0;
    void *s = scratch(lane, 1);
    if (!s)
        return NO_MEMORY;
#define CALL(x) fault = inspect_##x(in, elements, overwrite, &tile, s)
    EACH(CALL)
#undef CALL
    free(s);
    *bad = tile;
    return fault;
}

int rose_codec_apply(int level, int lane, const struct streams *in, void *target, uint64_t elements, int overwrite,
                     int backwards, uint64_t first, uint64_t end, uint64_t *bad)
{
    (void)level;
    enum fault fault = SOUND;
    size_t tile = 0;
    void *s = scratch(lane, 1);
    if (!s)
        return NO_MEMORY;
#define CALL(x) fault = apply_##x(in, target, elements, overwrite, backwards, first, end, &tile, s)
    EACH(CALL)
#undef CALL
    free(s);
    *bad = tile;
    return fault;
}

int rose_codec_compose(int level, int lane, const struct streams *first, const struct streams *second,
                       uint64_t elements, int overwrite, struct streams *out, uint64_t *bad)
{
    (void)level;
    enum fault fault = SOUND;
    size_t tile = 0;
    void *s = scratch(lane, 3);
    if (!s)
        return NO_MEMORY;
#define CALL(x) fault = compose_##x(first, second, elements, overwrite, out, &tile, s)
    EACH(CALL)
#undef CALL
    free(s);
    *bad = tile;
    return fault;
}
