/* The loops that decide the speed, per instruction set. Included by lane.h.
 *
 * find: positions (those in the tile: `from` more than in `old` and `new`) at which n elements differ. Whole vectors
 * are stored: `at` has room for SLACK positions more than there are elements. find_many also gives their old and new
 * bits, which is quicker than to fetch them once many differ.
 * write_gap8: positions to gap codes; `out` has room for SLACK bytes more than are written.
 */

/* Across the pauses while tiles are packed; a page further on (see AHEAD_BYTES) where the processor does not do that. */
TARGET static inline void NAME(read_ahead)(const ELEM *old, const ELEM *new, size_t ahead)
{
    __builtin_prefetch((const void *)((uintptr_t)old + ahead));
    __builtin_prefetch((const void *)((uintptr_t)new + ahead));
}

/* Old and new bits of the `k` elements at `at`. */
TARGET static inline void NAME(fetch)(const ELEM *old, const ELEM *new, const uint16_t *at, size_t k, ELEM *before,
                                      ELEM *after)
{
    for (size_t j = 0; j < k; j++) {
        before[j] = old[at[j]];
        after[j] = new[at[j]];
    }
}

/* Where `bits` are set, `base` further on, to `at`; says how many. */
#if ISA == AVX512
TARGET static inline size_t NAME(places)(uint64_t bits, size_t base, uint16_t *at)
{
    const __m512i lanes =
        _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x3736353433323130, 0x2f2e2d2c2b2a2928, 0x2726252423222120,
                         0x1f1e1d1c1b1a1918, 0x1716151413121110, 0x0f0e0d0c0b0a0908, 0x0706050403020100);
    /* They are squeezed together as bytes, which fit one vector, and then widened. */
    __m512i found = _mm512_maskz_compress_epi8(bits, lanes), start = _mm512_set1_epi16((short)base);
    __m512i first = _mm512_add_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(found)), start);
    unsigned count = (unsigned)__builtin_popcountll(bits);
    if (__builtin_expect(count <= 8, 1)) { /* a full store crosses lines of the cache, and most find little */
        _mm_storeu_si128((__m128i *)at, _mm512_castsi512_si128(first));
    } else {
        __m512i rest = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(found, 1));
        _mm512_storeu_si512(at, first);
        _mm512_storeu_si512(at + 32, _mm512_add_epi16(rest, start));
    }
    return count;
}
#elif ISA == AVX2
/* One is written even where there is none: whether there is one cannot be predicted, a second is rare. */
TARGET static inline size_t NAME(places)(uint64_t bits, size_t base, uint16_t *at)
{
    size_t count = (size_t)__builtin_popcountll(bits);
    *at = (uint16_t)(base + (size_t)__builtin_ctzll(bits | 1ull << 63));
    for (bits &= bits - 1; __builtin_expect(bits != 0, 0); bits &= bits - 1)
        *++at = (uint16_t)(base + (size_t)__builtin_ctzll(bits));
    return count;
}
#else
TARGET static inline size_t NAME(places)(uint64_t bits, size_t base, uint16_t *at)
{
    size_t count = 0;
    for (; bits; bits &= bits - 1)
        at[count++] = (uint16_t)(base + (size_t)__builtin_ctzll(bits));
    return count;
}
#endif

#if ISA == AVX512 && LANE == 2
TARGET static size_t NAME(find)(const ELEM *old, const ELEM *new, size_t n, size_t from, uint16_t *at, size_t ahead)
{
    size_t k = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        NAME(read_ahead)(old + i, new + i, ahead);
        NAME(read_ahead)(old + i + 32, new + i + 32, ahead);
        __mmask32 low = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(old + i), _mm512_loadu_si512(new + i));
        __mmask32 high = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(old + i + 32), _mm512_loadu_si512(new + i + 32));
        k += NAME(places)(_mm512_kunpackd(high, low), from + i, at + k);
    }
    for (; i < n; i++)
        if (old[i] != new[i])
            at[k++] = (uint16_t)(from + i);
    return k;
}

/* Three times the work for each vector, but none for each element. */
TARGET static size_t NAME(find_many)(const ELEM *old, const ELEM *new, size_t n, size_t from, uint16_t *at,
                                     ELEM *before, ELEM *after, size_t ahead)
{
    size_t k = NAME(find)(old, new, n, from, at, ahead), i = 0, j = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i was = _mm512_loadu_si512(old + i), is = _mm512_loadu_si512(new + i);
        __mmask32 differ = _mm512_cmpneq_epu16_mask(was, is);
        _mm512_storeu_si512(before + j, _mm512_maskz_compress_epi16(differ, was));
        _mm512_storeu_si512(after + j, _mm512_maskz_compress_epi16(differ, is));
        j += (unsigned)__builtin_popcount(differ);
    }
    NAME(fetch)(old - from, new - from, at + j, k - j, before + j, after + j);
    return k;
}

#elif ISA == AVX512
TARGET static size_t NAME(find)(const ELEM *old, const ELEM *new, size_t n, size_t from, uint16_t *at, size_t ahead)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t k = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        NAME(read_ahead)(old + i, new + i, ahead);
        uint32_t differ = _mm512_cmpneq_epu32_mask(_mm512_loadu_si512(old + i), _mm512_loadu_si512(new + i));
        __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(from + i)));
        __m512i found = _mm512_maskz_compress_epi32((__mmask16)differ, here);
        _mm256_storeu_si256((__m256i *)(at + k), _mm512_cvtepi32_epi16(found));
        k += (size_t)__builtin_popcount(differ);
    }
    for (; i < n; i++)
        if (old[i] != new[i])
            at[k++] = (uint16_t)(from + i);
    return k;
}

#else

#if ISA == AVX2
/* One bit for each of the 64 / LANE elements of a cache line. */
TARGET static inline uint32_t NAME(differ)(const ELEM *old, const ELEM *new)
{
    __m256i o0 = _mm256_loadu_si256((const __m256i *)old), o1 = _mm256_loadu_si256((const __m256i *)old + 1);
    __m256i n0 = _mm256_loadu_si256((const __m256i *)new), n1 = _mm256_loadu_si256((const __m256i *)new + 1);
#if LANE == 2
    __m256i same = _mm256_packs_epi16(_mm256_cmpeq_epi16(o0, n0), _mm256_cmpeq_epi16(o1, n1));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(same, 0xd8));
#else
    uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(o0, n0)));
    uint32_t high = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(o1, n1)));
    return (low | high << 8) ^ 0xffff;
#endif
}
#else
TARGET static inline uint32_t NAME(differ)(const ELEM *old, const ELEM *new)
{
    ELEM any = 0;
    for (size_t i = 0; i < 64 / LANE; i++)
        any |= old[i] ^ new[i];
    if (__builtin_expect(any == 0, 1))
        return 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < 64 / LANE; i++)
        bits |= (uint32_t)(old[i] != new[i]) << i;
    return bits;
}
#endif

TARGET static size_t NAME(find)(const ELEM *old, const ELEM *new, size_t n, size_t from, uint16_t *at, size_t ahead)
{
    size_t k = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t bits = 0;
        for (size_t j = 0; j < 64; j += 64 / LANE) {
            NAME(read_ahead)(old + i + j, new + i + j, ahead);
            bits |= (uint64_t)NAME(differ)(old + i + j, new + i + j) << j;
        }
        k += NAME(places)(bits, from + i, at + k);
    }
    for (; i < n; i++)
        if (old[i] != new[i])
            at[k++] = (uint16_t)(from + i);
    return k;
}
#endif

#if ISA != AVX512 || LANE != 2
TARGET static size_t NAME(find_many)(const ELEM *old, const ELEM *new, size_t n, size_t from, uint16_t *at,
                                     ELEM *before, ELEM *after, size_t ahead)
{
    size_t k = NAME(find)(old, new, n, from, at, ahead);
    NAME(fetch)(old - from, new - from, at, k, before, after);
    return k;
}
#endif

/* `next` is the position behind the last element written before. */
TARGET static inline uint8_t *NAME(write_gaps)(const uint16_t *at, size_t k, uint32_t next, uint8_t *q)
{
    for (size_t j = 0; j < k; j++) {
        uint32_t gap = at[j] - next;
        next = at[j] + 1u;
        uint32_t skips = gap / SKIP;
        memset(q, SKIP, 8); /* most are fewer, and a branch on how many would be mispredicted */
        if (__builtin_expect(skips > 8, 0))
            memset(q, SKIP, skips);
        q += skips;
        *q++ = (uint8_t)(gap - skips * SKIP);
    }
    return q;
}

#if ISA == AVX512
TARGET static void NAME(write_gap8)(const uint16_t *at, size_t k, uint8_t *q)
{
    const __m512i one = _mm512_set1_epi16(1), skip = _mm512_set1_epi16(SKIP), two = _mm512_set1_epi16(2 * SKIP);
    if (k == 0)
        return;
    q = NAME(write_gaps)(at, 1, 0, q);
    size_t j = 1;
    for (; j + 32 <= k; j += 32) {
        __m512i gap = _mm512_sub_epi16(_mm512_loadu_si512(at + j), _mm512_loadu_si512(at + j - 1));
        gap = _mm512_sub_epi16(gap, one);
        if (_mm512_cmpge_epu16_mask(gap, two)) {
            q = NAME(write_gaps)(at + j, 32, at[j - 1] + 1u, q);
            continue;
        }
        /* Each gap as the pair (skip, rest); then the skips that are not needed are squeezed out. */
        __mmask32 far = _mm512_cmpge_epu16_mask(gap, skip);
        gap = _mm512_mask_sub_epi16(gap, far, gap, skip);
        __m512i pairs = _mm512_or_si512(_mm512_slli_epi16(gap, 8), skip);
        __mmask64 kept = _pdep_u64(far, 0x5555555555555555u) | 0xaaaaaaaaaaaaaaaau;
        _mm512_storeu_si512(q, _mm512_maskz_compress_epi8(kept, pairs));
        q += 32 + __builtin_popcount(far);
    }
    NAME(write_gaps)(at + j, k - j, at[j - 1] + 1u, q);
}
#else
TARGET static void NAME(write_gap8)(const uint16_t *at, size_t k, uint8_t *q) { NAME(write_gaps)(at, k, 0, q); }
#endif
