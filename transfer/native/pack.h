/* Packing: positions and steps to a tile's part of the streams. Included by lane.h. */

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

/* By way of a byte for each element, in `room`: of bits set one by one, each would wait for the one before it. */
TARGET static void NAME(write_bitmap)(const uint16_t *restrict at, size_t k, size_t n, uint8_t *restrict room,
                                      uint8_t *restrict out)
{
    size_t bytes = (n + 7) / 8;
    memset(room, 0, 8 * bytes);
    for (size_t j = 0; j < k; j++)
        room[at[j]] = 1;
    for (size_t i = 0; i < bytes; i++) {
        uint64_t eight;
        memcpy(&eight, room + 8 * i, 8);
        out[i] = (uint8_t)(eight * 0x0102040810204080u >> 56); /* the lowest bits of the eight, side by side */
    }
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

/* Steps of `k` elements among those of all `n`. */
TARGET static void NAME(spread)(const uint16_t *restrict at, const ELEM *restrict step, size_t k, size_t n,
                                ELEM *restrict out)
{
    memset(out, 0, n * LANE);
    for (size_t j = 0; j < k; j++)
        out[at[j]] = step[j];
}

/* Writes all of a tile but its check, and moves `to` behind it. `room` is for the steps of a whole tile. */
TARGET static void NAME(pack)(const uint16_t *at, const ELEM *step, size_t k, size_t n, int overwrite, ELEM *room,
                              size_t tile, struct streams *out, struct cursor *to)
{
    struct NAME(form) form = NAME(choose)(at, step, k, n, overwrite);
    uint8_t *where = out->index + to->index;
    if (form.index == GAP8) {
        NAME(write_gap8)(at, k, where);
    } else if (form.index == GAP16) {
        NAME(write_gap16)(at, k, where);
    } else if (form.index == BITMAP) {
        NAME(write_bitmap)(at, k, n, (uint8_t *)room, where);
    } else {
        NAME(spread)(at, step, k, n, room);
        step = room;
    }

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
    advance(to, out, tile, LANE);
}
