/* The codec for one element width and one instruction set; isas.h includes this once for each pair.
 *
 * Set by the includer: ELEM and SIGNED (types), LANE (bytes), ISA, TARGET (function attribute), NAME(x) (a suffix).
 */

/* Elements of one tile; while encoding, those of a batch of tiles. `spread` is room for the steps of a dense tile. */
struct NAME(scratch) {
    uint16_t at[BATCH + TILE + SLACK];
    ELEM before[BATCH + TILE + SLACK];
    ELEM after[BATCH + TILE + SLACK];
    ELEM step[BATCH + TILE + SLACK];
    ELEM spread[TILE];
    size_t ahead; /* see AHEAD_BYTES */
};

/* Bit patterns in the order of the numbers that they stand for, as a bijection: 0xffff.. (lowest) to 0x7fff.. */
TARGET static inline ELEM NAME(ordered)(ELEM bits)
{
    return bits ^ ((ELEM)((SIGNED)bits >> (8 * LANE - 1)) & (ELEM)((ELEM)-1 >> 1));
}
TARGET static inline ELEM NAME(zigzag)(ELEM step) { return (ELEM)(step << 1) ^ (ELEM)((SIGNED)step >> (8 * LANE - 1)); }
TARGET static inline ELEM NAME(unzigzag)(ELEM code) { return (ELEM)(code >> 1) ^ (ELEM)(0u - (code & 1u)); }

/* A whole tile's hash. */
TARGET static uint64_t NAME(hash)(const ELEM *data, size_t n, size_t base)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += element_hash(base + i, data[i]);
    return sum;
}

/* How much the hash grows when elements `at` go from `before` to `after`. */
TARGET static uint64_t NAME(growth)(const uint16_t *restrict at, const ELEM *restrict before,
                                    const ELEM *restrict after, size_t k, size_t base)
{
    uint64_t sum = 0;
    for (size_t j = 0; j < k; j++)
        sum += element_hash(base + at[j], after[j]) - element_hash(base + at[j], before[j]);
    return sum;
}

TARGET static uint64_t NAME(sparse_hash)(const uint16_t *restrict at, const ELEM *restrict value, size_t k, size_t base)
{
    uint64_t sum = 0;
    for (size_t j = 0; j < k; j++)
        sum += element_hash(base + at[j], value[j]);
    return sum;
}

#include "simd.h"

#include "pack.h"
#include "unpack.h"

#include "bucket.h"
