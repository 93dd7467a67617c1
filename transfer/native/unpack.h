/* Unpacking: a tile's part of the streams to positions and steps. Included by lane.h.
 *
 * The streams may have come over a network. Nothing is read behind the tile's part of them, whose bounds the caller has
 * checked, and nothing is written behind the scratch.
 */

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
        j += NAME(places)(bits, 8 * i, at + j);
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
