/* The codec for one element width and one instruction set; codec.c includes this once for each pair.
 *
 * Set by the includer: ELEM and SIGNED (types), LANE (bytes), ISA, TARGET (function attribute), NAME(x) (a suffix).
 * Everything here trusts its arguments, except what unpack() is for: streams that came over a network.
 */

/* Elements of one tile; while encoding, those of a batch of tiles in `at`, `before` and `after`. */
struct NAME(scratch) {
    uint16_t at[BATCH + TILE + SLACK];
    ELEM before[BATCH + TILE + SLACK];
    ELEM after[BATCH + TILE + SLACK];
    ELEM step[TILE + SLACK];
};

#include "simd.h"

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

/* ---- packing: positions and steps to the tile's part of the streams ---- */

TARGET static uint32_t NAME(skips)(const uint16_t *at, size_t k)
{
    if (k == 0)
        return 0;
    uint16_t skips = at[0] / SKIP; /* 257 at the most: they are as far apart as that, and the tile is 65,536 long */
    for (size_t j = 1; j < k; j++)
        skips = (uint16_t)(skips + (uint16_t)(at[j] - at[j - 1] - 1) / SKIP);
    return skips;
}

TARGET static void NAME(write_gap16)(const uint16_t *restrict at, size_t k, uint8_t *restrict out)
{
    uint32_t next = 0;
    for (size_t j = 0; j < k; j++) {
        uint16_t gap = (uint16_t)(at[j] - next);
        memcpy(out + 2 * j, &gap, 2);
        next = at[j] + 1u;
    }
}

TARGET static void NAME(write_bitmap)(const uint16_t *restrict at, size_t k, size_t n, uint8_t *restrict out)
{
    memset(out, 0, (n + 7) / 8);
    for (size_t j = 0; j < k; j++)
        out[at[j] >> 3] |= (uint8_t)(1u << (at[j] & 7));
}

/* How many steps need an escape from a nibble, and from a byte. */
TARGET static void NAME(count_wide)(const ELEM *step, size_t k, size_t *wide4, size_t *wide8)
{
    for (size_t start = 0; start < k; start += BLOCK) { /* in blocks, so that the counts fit a vector's lanes */
        size_t end = start + BLOCK < k ? start + BLOCK : k;
        ELEM over4 = 0, over8 = 0;
        for (size_t j = start; j < end; j++) {
            ELEM code = NAME(zigzag)(step[j]);
            over4 += code >= 15;
            over8 += code >= 255;
        }
        *wide4 += over4;
        *wide8 += over8;
    }
}

TARGET static void NAME(write_nibbles)(const ELEM *restrict step, size_t k, uint8_t *restrict out)
{
    for (size_t j = 0; j < k / 2; j++) {
        ELEM low = NAME(zigzag)(step[2 * j]), high = NAME(zigzag)(step[2 * j + 1]);
        out[j] = (uint8_t)((low < 15 ? low : 15) | (high < 15 ? high : 15) << 4);
    }
    if (k & 1) {
        ELEM low = NAME(zigzag)(step[k - 1]);
        out[k / 2] = (uint8_t)(low < 15 ? low : 15);
    }
}

TARGET static void NAME(write_bytes)(const ELEM *restrict step, size_t k, uint8_t *restrict out)
{
    for (size_t j = 0; j < k; j++) {
        ELEM code = NAME(zigzag)(step[j]);
        out[j] = (uint8_t)(code < 255 ? code : 255);
    }
}

TARGET static size_t NAME(write_escapes)(const ELEM *step, size_t k, ELEM threshold, uint8_t *out)
{
    size_t e = 0;
    for (size_t j = 0; j < k; j++)
        if (__builtin_expect(NAME(zigzag)(step[j]) >= threshold, 0))
            memcpy(out + LANE * e++, &step[j], LANE);
    return e;
}

/* The cheapest way to write `k` steps of which `wide4` need an escape from a nibble and `wide8` one from a byte. */
TARGET static enum value_code NAME(cheapest)(size_t k, size_t wide4, size_t wide8, size_t *cost)
{
    size_t nibble = value_bytes(k, NIBBLE, LANE) + LANE * wide4;
    size_t byte = value_bytes(k, BYTE, LANE) + LANE * wide8;
    size_t whole = value_bytes(k, WHOLE, LANE);
    *cost = nibble;
    enum value_code code = NIBBLE;
    if (byte < *cost)
        *cost = byte, code = BYTE;
    if (whole < *cost)
        *cost = whole, code = WHOLE;
    return code;
}

/* How a tile is written: its codes, and the sizes that follow from them. */
struct NAME(form) {
    enum index_code index;
    enum value_code value;
    size_t count, index_bytes, escapes;
};

/* The smallest form of `k` of a tile's `n` elements. */
TARGET static struct NAME(form) NAME(choose)(const uint16_t *at, const ELEM *step, size_t k, size_t n, int overwrite)
{
    size_t wide[3] = {0, 0, 0}, cost = k * LANE, dense_cost = cost, bitmap = (n + 7) / 8;
    struct NAME(form) form = {GAP8, WHOLE, k, SIZE_MAX, 0};
    enum value_code dense_value = WHOLE;
    if (!overwrite) {
        NAME(count_wide)(step, k, &wide[NIBBLE], &wide[BYTE]);
        form.value = NAME(cheapest)(k, wide[NIBBLE], wide[BYTE], &cost);
        dense_value = NAME(cheapest)(n, wide[NIBBLE], wide[BYTE], &dense_cost);
    }
    if (k <= bitmap)
        form.index_bytes = k + NAME(skips)(at, k);
    if (2 * k < form.index_bytes)
        form.index_bytes = 2 * k, form.index = GAP16;
    if (bitmap < form.index_bytes)
        form.index_bytes = bitmap, form.index = BITMAP;
    if (k > 0 && dense_cost < form.index_bytes + cost && (!overwrite || k == n))
        form = (struct NAME(form)){DENSE, dense_value, n, 0, 0};
    form.escapes = wide[form.value];
    return form;
}

/* Steps of `k` elements become those of all `n`: from the back, so that none is overtaken. */
TARGET static void NAME(spread)(const uint16_t *at, ELEM *step, size_t k, size_t n)
{
    for (size_t i = n; i-- > 0;)
        step[i] = k > 0 && at[k - 1] == i ? step[--k] : 0;
}

/* Writes a tile and moves `to` behind it. `step` has room for a whole tile and is spent. */
TARGET static void NAME(pack)(const uint16_t *at, ELEM *step, size_t k, size_t n, int overwrite, uint64_t check,
                              size_t tile, struct streams *out, struct cursor *to)
{
    struct NAME(form) form = NAME(choose)(at, step, k, n, overwrite);
    uint8_t *where = out->index + to->index;
    if (form.index == GAP8)
        NAME(write_gap8)(at, k, where);
    else if (form.index == GAP16)
        NAME(write_gap16)(at, k, where);
    else if (form.index == BITMAP)
        NAME(write_bitmap)(at, k, n, where);
    else
        NAME(spread)(at, step, k, n);

    where = out->values + to->values;
    if (form.value == NIBBLE)
        NAME(write_nibbles)(step, form.count, where);
    else if (form.value == BYTE)
        NAME(write_bytes)(step, form.count, where);
    else
        memcpy(where, step, form.count * LANE);
    if (form.escapes)
        NAME(write_escapes)(step, form.count, form.value == NIBBLE ? 15 : 255, out->escape + to->escape);

    out->shape[tile] = shape_of((uint32_t)form.count, form.index, form.value);
    out->index_bytes[tile] = (uint32_t)form.index_bytes;
    out->escapes[tile] = (uint32_t)form.escapes;
    out->check[tile] = check;
    advance(to, out, tile, LANE);
}

/* ---- unpacking: never reads behind the tile's part of the streams, never writes behind the scratch ---- */

TARGET static enum fault NAME(read_gap8)(const uint8_t *in, size_t size, size_t k, size_t n, uint16_t *at)
{
    if (size < k || size > k + TILE / SKIP || (size > 0 && in[size - 1] == SKIP))
        return BAD_SIZE;
    size_t next = 0, j = 0;
    for (size_t q = 0; q < size; q++) {
        uint32_t gap = in[q], element = gap != SKIP;
        next += gap;
        at[j] = (uint16_t)next;
        j += element;
        next += element;
    }
    return j == k && next <= n ? SOUND : BAD_POSITION; /* positions only grow: the last one vouches for all */
}

TARGET static enum fault NAME(read_gap16)(const uint8_t *in, size_t size, size_t k, size_t n, uint16_t *at)
{
    if (size != 2 * k)
        return BAD_SIZE;
    size_t next = 0;
    for (size_t j = 0; j < k; j++) {
        uint16_t gap;
        memcpy(&gap, in + 2 * j, 2);
        next += gap;
        at[j] = (uint16_t)next;
        next++;
    }
    return next <= n ? SOUND : BAD_POSITION;
}

TARGET static enum fault NAME(read_bitmap)(const uint8_t *in, size_t size, size_t k, size_t n, uint16_t *at)
{
    if (size != (n + 7) / 8)
        return BAD_SIZE;
    size_t found = 0;
    for (size_t i = 0; i < size; i++)
        found += (size_t)__builtin_popcount(in[i]);
    if (found != k || (n % 8 && in[size - 1] >> n % 8))
        return BAD_POSITION;
    size_t j = 0;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t bits = 0;
        memcpy(&bits, in + i, size - i < 8 ? size - i : 8);
        for (; bits; bits &= bits - 1)
            at[j++] = (uint16_t)(8 * i + (size_t)__builtin_ctzll(bits));
    }
    return SOUND;
}

/* Steps from codes of one byte each, with the escapes put in. `zero` says whether a step of 0 may stand here. */
TARGET static enum fault NAME(read_codes)(const uint8_t *restrict code, size_t k, uint8_t threshold, int zero,
                                          const uint8_t *escape, size_t escapes, ELEM *restrict step)
{
    size_t zeros = 0, wide = 0, e = 0;
    for (size_t start = 0; start < k; start += BLOCK) {
        size_t end = start + BLOCK < k ? start + BLOCK : k;
        uint16_t nothing = 0, over = 0;
        for (size_t j = start; j < end; j++) {
            nothing += code[j] == 0;
            over += code[j] == threshold;
            step[j] = NAME(unzigzag)(code[j]);
        }
        zeros += nothing;
        wide += over;
    }
    if ((zeros && !zero) || wide != escapes)
        return BAD_VALUE;
    for (size_t j = 0; e < escapes; j++)
        if (code[j] == threshold) {
            memcpy(&step[j], escape + LANE * e++, LANE);
            if (NAME(zigzag)(step[j]) < threshold)
                return BAD_VALUE;
        }
    return SOUND;
}

TARGET static enum fault NAME(read_whole)(const uint8_t *in, size_t k, int zero, size_t escapes, ELEM *step)
{
    size_t zeros = 0;
    memcpy(step, in, k * LANE);
    for (size_t j = 0; j < k; j++)
        zeros += step[j] == 0;
    return (zeros && !zero) || escapes ? BAD_VALUE : SOUND;
}

/* Positions and steps of tile `tile`, whose part of the streams begins at `from`, into the scratch. */
TARGET static enum fault NAME(unpack)(const struct streams *in, const struct cursor *from, size_t tile, size_t n,
                                      int overwrite, struct NAME(scratch) *s)
{
    size_t k = shape_count(in->shape[tile]), size = in->index_bytes[tile], escapes = in->escapes[tile];
    uint32_t index = shape_index(in->shape[tile]), value = shape_value(in->shape[tile]);
    if (k > n || index > DENSE || value > WHOLE || (overwrite && k > 0 && value != WHOLE))
        return BAD_CODE;
    const uint8_t *where = in->index + from->index;
    enum fault fault = SOUND;
    if (index == GAP8) {
        fault = NAME(read_gap8)(where, size, k, n, s->at);
    } else if (index == GAP16) {
        fault = NAME(read_gap16)(where, size, k, n, s->at);
    } else if (index == BITMAP) {
        fault = NAME(read_bitmap)(where, size, k, n, s->at);
    } else if (k != n || size != 0) {
        fault = BAD_SIZE;
    } else {
        for (size_t i = 0; i < n; i++)
            s->at[i] = (uint16_t)i;
    }
    if (fault != SOUND)
        return fault;

    int zero = overwrite || index == DENSE;
    const uint8_t *escape = in->escape + from->escape;
    where = in->values + from->values;
    if (value == WHOLE)
        return NAME(read_whole)(where, k, zero, escapes, s->step);
    if (value == BYTE)
        return NAME(read_codes)(where, k, 255, zero, escape, escapes, s->step);
    uint8_t *code = (uint8_t *)s->before; /* not in use yet */
    for (size_t j = 0; j < (k + 1) / 2; j++) {
        code[2 * j] = where[j] & 15;
        code[2 * j + 1] = where[j] >> 4;
    }
    if (k & 1 && code[k])
        return BAD_VALUE;
    return NAME(read_codes)(code, k, 15, zero, escape, escapes, s->step);
}

/* ---- whole buckets ---- */

/* Old and new bits of the elements collected from number `k` up to `end`. */
TARGET static inline void NAME(fetch)(const ELEM *old, const ELEM *new, size_t k, size_t end, struct NAME(scratch) *s)
{
    for (; k < end; k++) {
        s->before[k] = old[s->at[k]];
        s->after[k] = new[s->at[k]];
    }
}

/* Appends a tile's elements that differ (all of them, if `old` is NULL) to the `k` there are, and counts on.
 *
 * Their bits are fetched while the first cache still has them, but a piece behind: waiting for the positions of the
 * latest piece would keep the processor from reading ahead.
 */
TARGET static size_t NAME(collect)(const ELEM *old, const ELEM *new, size_t n, size_t k, struct NAME(scratch) *s)
{
    if (!old) {
        for (size_t i = 0; i < n; i++)
            s->at[k + i] = (uint16_t)i;
        memcpy(s->after + k, new, n * LANE);
        return k + n;
    }
    size_t fetched = k;
    const size_t piece = PIECE_BYTES / LANE;
    for (size_t from = 0; from < n; from += piece) {
        size_t ready = k;
        k += NAME(find)(old + from, new + from, n - from < piece ? n - from : piece, from, s->at + k);
        NAME(fetch)(old, new, fetched, ready, s);
        fetched = ready;
    }
    NAME(fetch)(old, new, fetched, k, s);
    return k;
}

/* Packs `k` elements of a tile that were collected from number `first` on. */
TARGET static void NAME(pack_collected)(struct NAME(scratch) *s, size_t first, size_t k, size_t n, int overwrite,
                                        size_t tile, struct streams *out, struct cursor *to)
{
    const uint16_t *at = s->at + first;
    const ELEM *before = s->before + first, *after = s->after + first;
    uint64_t check;
    if (overwrite) {
        memcpy(s->step, after, k * LANE);
        check = NAME(sparse_hash)(at, after, k, tile * TILE);
    } else {
        for (size_t j = 0; j < k; j++)
            s->step[j] = NAME(ordered)(after[j]) - NAME(ordered)(before[j]);
        check = NAME(growth)(at, before, after, k, tile * TILE);
    }
    NAME(pack)(at, s->step, k, n, overwrite, check, tile, out, to);
}

/* `old` may be NULL for an overwrite of every element.
 *
 * Tiles are collected in batches and then packed: each change from the one to the other costs the memory its stride.
 */
TARGET static void NAME(encode)(const void *old_data, const void *new_data, size_t elements, int overwrite,
                                struct streams *out, struct NAME(scratch) *s)
{
    const ELEM *old = old_data, *new = new_data;
    struct cursor to = {0, 0, 0};
    size_t tiles = (elements + TILE - 1) / TILE, begin[BATCH_TILES + 1];
    for (size_t first = 0, count; first < tiles; first += count) {
        begin[0] = 0;
        for (count = 0; first + count < tiles && count < BATCH_TILES && begin[count] < BATCH; count++) {
            size_t base = (first + count) * TILE, n = tile_length(elements, first + count);
            begin[count + 1] = NAME(collect)(old ? old + base : NULL, new + base, n, begin[count], s);
        }
        for (size_t i = 0; i < count; i++) {
            size_t n = tile_length(elements, first + i);
            NAME(pack_collected)(s, begin[i], begin[i + 1] - begin[i], n, overwrite, first + i, out, &to);
        }
    }
    out->index_size = to.index;
    out->values_size = to.values;
    out->escape_size = to.escape;
}

/* Whether every tile can be unpacked; for an overwrite also whether it holds what its check says. */
TARGET static enum fault NAME(inspect)(const struct streams *in, size_t elements, int overwrite, size_t *bad,
                                       struct NAME(scratch) *s)
{
    struct cursor from = {0, 0, 0};
    for (size_t tile = 0; tile * TILE < elements; tile++) {
        enum fault fault = NAME(unpack)(in, &from, tile, tile_length(elements, tile), overwrite, s);
        size_t k = shape_count(in->shape[tile]);
        if (fault == SOUND && overwrite && NAME(sparse_hash)(s->at, s->step, k, tile * TILE) != in->check[tile])
            fault = BAD_CHECK;
        if (fault != SOUND) {
            *bad = tile;
            return fault;
        }
        advance(&from, in, tile, LANE);
    }
    return SOUND;
}

/* Applies tiles `first` up to `end`, each only if its elements get the hash that its check promises. */
TARGET static enum fault NAME(apply)(const struct streams *in, void *target, size_t elements, int overwrite,
                                     int backwards, size_t first, size_t end, size_t *bad, struct NAME(scratch) *s)
{
    struct cursor from = {0, 0, 0};
    for (size_t tile = 0; tile < end; advance(&from, in, tile++, LANE)) {
        size_t base = tile * TILE, k = shape_count(in->shape[tile]);
        ELEM *data = (ELEM *)target + base;
        if (tile < first || k == 0)
            continue;
        enum fault fault = NAME(unpack)(in, &from, tile, tile_length(elements, tile), overwrite, s);
        if (fault == SOUND && !overwrite) {
            for (size_t j = 0; j < k; j++)
                s->before[j] = data[s->at[j]];
            for (size_t j = 0; j < k; j++) {
                ELEM step = backwards ? (ELEM)(0u - s->step[j]) : s->step[j];
                s->after[j] = NAME(ordered)((ELEM)(NAME(ordered)(s->before[j]) + step));
            }
            uint64_t grown = NAME(growth)(s->at, s->before, s->after, k, base);
            if (grown != (backwards ? 0 - in->check[tile] : in->check[tile]))
                fault = BAD_CHECK;
        }
        if (fault != SOUND) {
            *bad = tile;
            return fault;
        }
        const ELEM *value = overwrite ? s->step : s->after;
        for (size_t j = 0; j < k; j++)
            data[s->at[j]] = value[j];
    }
    return SOUND;
}

/* `into` gets the elements of both, where both have one their sum (an overwrite: the later one), without zeros. */
TARGET static size_t NAME(merge)(const struct NAME(scratch) *first, size_t first_k, const struct NAME(scratch) *second,
                                 size_t second_k, int overwrite, struct NAME(scratch) *into)
{
    size_t i = 0, j = 0, k = 0;
    while (i < first_k || j < second_k) {
        uint32_t a = i < first_k ? first->at[i] : TILE, b = j < second_k ? second->at[j] : TILE;
        ELEM step = overwrite && a == b ? 0 : a <= b ? first->step[i] : 0;
        if (b <= a)
            step = (ELEM)(step + second->step[j]);
        i += a <= b;
        j += b <= a;
        into->at[k] = (uint16_t)(a < b ? a : b);
        into->step[k] = step;
        k += overwrite || step != 0;
    }
    return k;
}

TARGET static enum fault NAME(compose)(const struct streams *first, const struct streams *second, size_t elements,
                                       int overwrite, struct streams *out, size_t *bad, struct NAME(scratch) *s)
{
    struct cursor from = {0, 0, 0}, then = {0, 0, 0}, to = {0, 0, 0};
    for (size_t tile = 0; tile * TILE < elements; tile++) {
        size_t n = tile_length(elements, tile);
        enum fault fault = NAME(unpack)(first, &from, tile, n, overwrite, &s[0]);
        if (fault == SOUND)
            fault = NAME(unpack)(second, &then, tile, n, overwrite, &s[1]);
        if (fault != SOUND) {
            *bad = tile;
            return fault;
        }
        size_t k = NAME(merge)(&s[0], shape_count(first->shape[tile]), &s[1], shape_count(second->shape[tile]),
                               overwrite, &s[2]);
        uint64_t check = overwrite ? NAME(sparse_hash)(s[2].at, s[2].step, k, tile * TILE)
                                   : first->check[tile] + second->check[tile];
        NAME(pack)(s[2].at, s[2].step, k, n, overwrite, check, tile, out, &to);
        advance(&from, first, tile, LANE);
        advance(&then, second, tile, LANE);
    }
    out->index_size = to.index;
    out->values_size = to.values;
    out->escape_size = to.escape;
    return SOUND;
}
