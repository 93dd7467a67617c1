/* Whole buckets, tile by tile. Included by lane.h. */

/* What is to be written of the elements fetched from number `k` up to `end`; returns their part of the tile's check. */
TARGET static inline uint64_t NAME(settle)(struct NAME(scratch) *s, size_t k, size_t end, size_t base, int overwrite)
{
    if (overwrite) {
        memcpy(s->step + k, s->after + k, (end - k) * LANE);
        return NAME(sparse_hash)(s->at + k, s->after + k, end - k, base);
    }
    for (size_t j = k; j < end; j++)
        s->step[j] = NAME(ordered)(s->after[j]) - NAME(ordered)(s->before[j]);
    return NAME(growth)(s->at + k, s->before + k, s->after + k, end - k, base);
}

/* Appends a tile's elements that differ (all of them, if `old` is NULL) to the `k` there are, and counts on.
 *
 * What is found is worked on in between, in small portions, while the memory is busy with what is read ahead: their
 * bits are fetched while the first cache still has them, but a piece behind, because to wait for the positions of the
 * latest piece would keep the processor from reading on.
 */
TARGET static size_t NAME(collect)(const ELEM *old, const ELEM *new, size_t n, size_t k, size_t base, int overwrite,
                                   struct NAME(scratch) *s, uint64_t *check)
{
    if (!old) {
        for (size_t i = 0; i < n; i++)
            s->at[k + i] = (uint16_t)i;
        memcpy(s->after + k, new, n * LANE);
        *check = NAME(settle)(s, k, k + n, base, overwrite);
        return k + n;
    }
    size_t fetched = k, settled = k;
    const size_t piece = PIECE_BYTES / LANE;
    uint64_t sum = 0;
    int many = 0;
    for (size_t from = 0; from < n; from += piece) {
        size_t ready = k, here = n - from < piece ? n - from : piece;
        if (many)
            k += NAME(find_many)(old + from, new + from, here, from, s->at + k, s->before + k, s->after + k,
                                 s->ahead);
        else
            k += NAME(find)(old + from, new + from, here, from, s->at + k, s->ahead);
        NAME(fetch)(old, new, s->at + fetched, ready - fetched, s->before + fetched, s->after + fetched);
        fetched = many ? k : ready;
        many = k - ready > piece / MANY;
        for (; settled + PORTION <= fetched; settled += PORTION)
            sum += NAME(settle)(s, settled, settled + PORTION, base, overwrite);
    }
    NAME(fetch)(old, new, s->at + fetched, k - fetched, s->before + fetched, s->after + fetched);
    *check = sum + NAME(settle)(s, settled, k, base, overwrite);
    return k;
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
    s->ahead = ahead_bytes();
    size_t tiles = (elements + TILE - 1) / TILE, begin[BATCH_TILES + 1];
    for (size_t first = 0, count; first < tiles; first += count) {
        begin[0] = 0;
        for (count = 0; first + count < tiles && count < BATCH_TILES && begin[count] < BATCH; count++) {
            size_t base = (first + count) * TILE, n = tile_length(elements, first + count);
            begin[count + 1] = NAME(collect)(old ? old + base : NULL, new + base, n, begin[count], base, overwrite, s,
                                             &out->check[first + count]);
        }
        for (size_t i = 0; i < count; i++)
            NAME(pack)(s->at + begin[i], s->step + begin[i], begin[i + 1] - begin[i], tile_length(elements, first + i),
                       overwrite, s->spread, first + i, out, &to);
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
        out->check[tile] = check;
        NAME(pack)(s[2].at, s[2].step, k, n, overwrite, s[2].spread, tile, out, &to);
        advance(&from, first, tile, LANE);
        advance(&then, second, tile, LANE);
    }
    out->index_size = to.index;
    out->values_size = to.values;
    out->escape_size = to.escape;
    return SOUND;
}
