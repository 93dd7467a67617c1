/* What the delta codec's kernels share: the tile, its codes, the streams and the element hash.
 *
 * The format is described once, in rose_transfer/codec/streams.py and wire.py. These kernels must put out the same
 * bytes as rose_transfer/codec/numpy_kernels.py, whatever the instruction set; tests compare them.
 */
#ifndef ROSE_FORMAT_H
#define ROSE_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#define TILE 65536u
#define SLACK 512u /* elements of room behind a tile's scratch: whole-vector stores, and the skips of a gap stream */
#define SKIP 255u  /* a gap byte that moves on without an element */

/* How the work is cut up; measured, and of no consequence for the result. */
#define BATCH_TILES 4u
#define BATCH 16384u /* elements after which no further tile is collected before those are packed */
#define AHEAD_BYTES 4096u /* how far the encoder reads ahead on each side */
#define AHEAD_BYTES_AMD 256u /* that far on these, which fetch a stream by themselves and are hindered by more */
#define PIECE_BYTES 2048u /* of each side that are compared at a time: four pieces must fit the first cache */
#define PORTION 32u /* elements that are worked on at a time while others are read */
#define MANY 16u /* from one in so many on, old and new bits are taken from whole vectors */
#define BLOCK 32768u /* elements that are counted at a time, by 16-bit counters */

enum index_code { GAP8, GAP16, BITMAP, DENSE };
enum value_code { NIBBLE, BYTE, WHOLE };
enum fault {
    SOUND = 0,
    BAD_CODE = 1,     /* an unknown code, or more elements than the tile has */
    BAD_SIZE = 2,     /* the tile's streams do not have the size that its codes ask for */
    BAD_POSITION = 3, /* positions beyond the tile, or not as many as announced */
    BAD_VALUE = 4,    /* a value that no encoder writes, or escapes not as many as announced */
    BAD_CHECK = 5,    /* the elements do not have the tile's check */
    NO_MEMORY = 6
};

/* One delta in memory. Arrays of one entry per tile, then the three byte streams; see streams.py. */
struct streams {
    uint32_t *shape;
    uint32_t *index_bytes;
    uint32_t *escapes;
    uint64_t *check;
    uint8_t *index;
    uint8_t *values;
    uint8_t *escape; /* elements, not aligned */
    uint64_t index_size;
    uint64_t values_size;
    uint64_t escape_size;
};

static inline uint32_t shape_of(uint32_t count, enum index_code index, enum value_code value)
{
    return count | (uint32_t)index << 20 | (uint32_t)value << 24;
}
static inline uint32_t shape_count(uint32_t shape) { return shape & 0xfffff; }
static inline uint32_t shape_index(uint32_t shape) { return shape >> 20 & 0xf; }
static inline uint32_t shape_value(uint32_t shape) { return shape >> 24; }

static inline size_t value_bytes(size_t count, uint32_t code, size_t lane)
{
    return code == NIBBLE ? (count + 1) / 2 : code == BYTE ? count : count * lane;
}

/* A bijection of 64 bits, so that no two (position, bits) pairs share a hash; sums of it identify a set. */
static inline uint64_t element_hash(uint64_t position, uint64_t bits)
{
    uint64_t x = position << 32 | bits;
    x *= 0x9e3779b97f4a7c15u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

/* Where in the three streams a tile's part begins. */
struct cursor {
    size_t index, values, escape;
};

static inline void advance(struct cursor *at, const struct streams *s, size_t tile, size_t lane)
{
    at->index += s->index_bytes[tile];
    at->values += value_bytes(shape_count(s->shape[tile]), shape_value(s->shape[tile]), lane);
    at->escape += s->escapes[tile] * lane;
}

static inline size_t tile_length(size_t elements, size_t tile)
{
    size_t left = elements - tile * TILE;
    return left < TILE ? left : TILE;
}

#endif
