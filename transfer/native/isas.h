/* One element width for each instruction set. Set by the includer: LANE, BITS, ELEM, SIGNED; all undefined at the end. */
#define NAME_3(x, bits, isa) x##_##bits##_##isa
#define NAME_2(x, bits, isa) NAME_3(x, bits, isa)

#define ISA SCALAR
#define TARGET
#define NAME(x) NAME_2(x, BITS, scalar)
#include "lane.h"
#undef ISA
#undef TARGET
#undef NAME

#ifdef X86
#define ISA AVX2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define NAME(x) NAME_2(x, BITS, avx2)
#include "lane.h"
#undef ISA
#undef TARGET
#undef NAME

#define ISA AVX512
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2")))
#define NAME(x) NAME_2(x, BITS, avx512)
#include "lane.h"
#undef ISA
#undef TARGET
#undef NAME
#endif

#undef NAME_2
#undef NAME_3
#undef LANE
#undef BITS
#undef ELEM
#undef SIGNED
