// Elementary functions of float32 in straight-line code: no branches, no calls, so that a loop marked
// `#pragma omp simd` runs them for as many elements at once as the processor's registers hold. Those of float64 are the
// C library's. Errors, in units in the last place on every 1,025th float and special values, are asserted by
// tests/compiler/kernels/cpp/test_vector_math.py.
//
// Methods. Reductions of exp and log: Cody and Waite, "Software Manual for the Elementary Functions" (1980). Those of sin
// and cos for large arguments: Payne and Hanek, "Radian reduction for trigonometric functions" (SIGNUM, 1983). float16 to
// and from float32: the IEEE 754 layout, with the scaling of subnormals by one float addition. Polynomials are minimax
// fits (Lawson's iteration on Chebyshev bases in float64), the steps around them are given beside each function.

#include <cstdint>

#define MONARCH_INLINE static inline __attribute__((always_inline))

typedef uint16_t f16;   // raw bits, as memory holds them; only cast and stored
typedef uint16_t bf16;

MONARCH_INLINE float as_float(int32_t bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
MONARCH_INLINE int32_t as_bits(float value) { int32_t bits; __builtin_memcpy(&bits, &value, 4); return bits; }
MONARCH_INLINE double as_double(int64_t bits) { double value; __builtin_memcpy(&value, &bits, 8); return value; }
MONARCH_INLINE int64_t as_bits(double value) { int64_t bits; __builtin_memcpy(&bits, &value, 8); return bits; }
MONARCH_INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MONARCH_INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }

// -- half-precision formats, to nearest even ---------------------------------------------------------------------------

MONARCH_INLINE float from_bf16(bf16 bits) { return as_float((int32_t)((uint32_t)bits << 16)); }

MONARCH_INLINE bf16 to_bf16(float value) {
    uint32_t bits = (uint32_t)as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(value != value ? 0x7fc0 : rounded);
}

MONARCH_INLINE float from_f16(f16 bits) {
    uint32_t wide = (uint32_t)bits, magnitude = (wide & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    uint32_t normal = magnitude + (112u << 23);
    float subnormal = as_float((int32_t)(magnitude + (113u << 23))) - as_float(113 << 23);
    uint32_t special = magnitude + (224u << 23);
    uint32_t result = exponent == 0 ? (uint32_t)as_bits(subnormal) : (exponent == 0x0f800000 ? special : normal);
    return as_float((int32_t)(result | ((wide & 0x8000) << 16)));
}

MONARCH_INLINE f16 to_f16(float value) {
    uint32_t bits = (uint32_t)as_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t subnormal = (uint32_t)as_bits(as_float((int32_t)magnitude) + 0.5f) - (126u << 23);
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= (143u << 23) ? 0x7c00 : result;
    result = magnitude > 0x7f800000 ? 0x7e00 : result;
    return (f16)(result | sign);
}

// -- exp and its kin ---------------------------------------------------------------------------------------------------

// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2.
MONARCH_INLINE float exp_tail(float r) {
    float p = 0x1.a19fbp-13f;
    p = fma_(p, r, 0x1.6d75f2p-10f);
    p = fma_(p, r, 0x1.11109p-7f);
    p = fma_(p, r, 0x1.5554acp-5f);
    p = fma_(p, r, 0x1.555556p-3f);
    return fma_(p, r, 0.5f);
}

// x = n ln 2 + r: gives n, and r by reference.
MONARCH_INLINE float exp_reduce(float x, float& r) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    float n = fma_(x, 0x1.715476p+0f, shift) - shift;
    r = fma_(n, -0x1.62e4p-1f, x);
    r = fma_(n, -0x1.7f7d1cp-20f, r);
    return n;
}

// For x from -104 to 89. 2^n is multiplied in in two steps, so that a subnormal result is rounded once, at the end.
MONARCH_INLINE float exp_within(float x) {
    float r;
    int32_t n = (int32_t)exp_reduce(x, r), half = n >> 1;
    float p = fma_(exp_tail(r), r * r, r) + 1.0f;
    return p * as_float((half + 127) << 23) * as_float((n - half + 127) << 23);
}

// NaN passes the bounds, and stays NaN.
MONARCH_INLINE float exp_(float x) {
    float c = x < -104.0f ? -104.0f : x;
    return exp_within(c > 89.0f ? 89.0f : c);
}

// For x <= 0, where what is below 2^-125 does not count.
MONARCH_INLINE float exp_normal(float x) {
    float r, n = exp_reduce(x < -87.0f ? -87.0f : x, r);
    return (fma_(exp_tail(r), r * r, r) + 1.0f) * as_float(((int32_t)n + 127) << 23);
}

// For x <= 0.
MONARCH_INLINE float exp_below(float x) { return exp_within(x < -104.0f ? -104.0f : x); }

// For x from -30 to 89: 2^n (e^r - 1) + (2^n - 1), both halved so that 2^128 can be written.
MONARCH_INLINE float expm1_within(float x) {
    float r, n = exp_reduce(x, r), q = fma_(exp_tail(r), r * r, r);
    float scale = as_float(((int32_t)n + 126) << 23);
    float result = 2.0f * fma_(scale, q, scale - 0.5f);
    return __builtin_fabsf(x) < 0x1p-25f ? x : result;
}

MONARCH_INLINE float expm1_(float x) {
    float c = x < -30.0f ? -30.0f : x;
    return expm1_within(c > 89.0f ? 89.0f : c);
}

// With e = e^-|x| and s = e / (1 + e), the smaller of the two sides: 1 - s, or e - e s, which has fewer roundings than s.
MONARCH_INLINE float sigmoid_(float x) {
    float e = exp_below(-__builtin_fabsf(x)), s = e / (1.0f + e);
    return x < 0.0f ? fma_(-e, s, e) : 1.0f - s;
}

// (e^2x - 1) / (e^2x + 1)
MONARCH_INLINE float tanh_(float x) {
    float a = __builtin_fabsf(x), t = expm1_within(2.0f * (a > 10.0f ? 10.0f : a));
    return __builtin_copysignf(t / (t + 2.0f), x);
}

// Odd polynomial below 0.95; 1 - e^-(x P(x)) above, where x P(x) = -log(1 - erf x) up to 4, and enough beyond.
MONARCH_INLINE float erf_(float x) {
    float a = __builtin_fabsf(x), s = a * a;
    float p = 0x1.589470p-14f;
    p = fma_(p, s, -0x1.a8fc6cp-11f);
    p = fma_(p, s, 0x1.54a490p-8f);
    p = fma_(p, s, -0x1.b80b0ep-6f);
    p = fma_(p, s, 0x1.ce2de2p-4f);
    p = fma_(p, s, -0x1.812742p-2f);
    p = fma_(p, s, 0x1.06eba8p-3f);
    float small = fma_(p, a, a);
    float q = 0x1.9e0bc0p-17f;
    q = fma_(q, a, -0x1.5e2efcp-12f);
    q = fma_(q, a, 0x1.e3687ap-9f);
    q = fma_(q, a, -0x1.86e912p-6f);
    q = fma_(q, a, 0x1.b39ca8p-4f);
    q = fma_(q, a, 0x1.452978p-1f);
    q = fma_(q, a, 0x1.20f03cp+0f);
    float large = 1.0f - exp_normal(-q * a);
    return __builtin_copysignf(a < 0.95f ? small : large, x);
}

// -- log and its kin ---------------------------------------------------------------------------------------------------

// log(1 + f) + n ln 2 for 1 + f between sqrt(1/2) and sqrt(2).
MONARCH_INLINE float log_sum(float f, float n) {
    float s = f * f, p = 0x1.1b4be2p-4f;
    p = fma_(p, f, -0x1.e2fc18p-4f);
    p = fma_(p, f, 0x1.e65678p-4f);
    p = fma_(p, f, -0x1.fb40a4p-4f);
    p = fma_(p, f, 0x1.233238p-3f);
    p = fma_(p, f, -0x1.5562f0p-3f);
    p = fma_(p, f, 0x1.99a54cp-3f);
    p = fma_(p, f, -0x1.ffffeep-3f);
    p = fma_(p, f, 0x1.555546p-2f);
    float tail = fma_(n, 0x1.7f7d1cp-20f, p * (f * s));
    return fma_(n, 0x1.62e4p-1f, fma_(-0.5f, s, tail) + f);
}

MONARCH_INLINE float log_(float x) {
    bool subnormal = x < 0x1p-126f;
    int32_t bits = as_bits(subnormal ? x * 0x1p23f : x) - 0x3f3504f3;  // sqrt(1/2)
    float n = (float)(bits >> 23) - (subnormal ? 23.0f : 0.0f);
    float result = log_sum(as_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, n);
    result = x == 0.0f ? -__builtin_inff() : result;
    result = x < 0.0f ? __builtin_nanf("") : result;
    return x < __builtin_inff() ? result : x;
}

// What rounding 1 + x lost is put back behind the reduction.
MONARCH_INLINE float log1p_(float x) {
    float u = 1.0f + x, lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
    int32_t bits = as_bits(u) - 0x3f3504f3, n = bits >> 23;
    float f = as_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    f = fma_(lost, as_float((127 - (n > 126 ? 126 : n)) << 23), f);
    float result = log_sum(f, (float)n);
    result = __builtin_fabsf(x) < 0x1p-25f ? x : result;
    result = x == -1.0f ? -__builtin_inff() : result;
    result = x < -1.0f ? __builtin_nanf("") : result;
    return x < __builtin_inff() ? result : x;
}

// -- pow, in float64: 2^(y log2 |x|) -----------------------------------------------------------------------------------

MONARCH_INLINE double log2_of(double x) {  // 2 artanh((m - 1) / (m + 1)) of the mantissa m
    int64_t bits = as_bits(x) - 0x3fe6a09e667f3bcd;
    double n = (double)(int32_t)(bits >> 52), m = as_double((bits & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 1.0 / 15.0;
    p = fma_(p, z, 1.0 / 13.0);
    p = fma_(p, z, 1.0 / 11.0);
    p = fma_(p, z, 1.0 / 9.0);
    p = fma_(p, z, 1.0 / 7.0);
    p = fma_(p, z, 1.0 / 5.0);
    p = fma_(p, z, 1.0 / 3.0);
    return fma_(2.0 * fma_(p * z, s, s), 0x1.71547652b82fep+0, n);
}

MONARCH_INLINE double exp2_of(double x) {
    double c = x < -200.0 ? -200.0 : x;
    c = c > 200.0 ? 200.0 : c;
    double n = __builtin_rint(c), r = (c - n) * 0x1.62e42fefa39efp-1, p = 1.0 / 362880.0;
    p = fma_(p, r, 1.0 / 40320.0);
    p = fma_(p, r, 1.0 / 5040.0);
    p = fma_(p, r, 1.0 / 720.0);
    p = fma_(p, r, 1.0 / 120.0);
    p = fma_(p, r, 1.0 / 24.0);
    p = fma_(p, r, 1.0 / 6.0);
    p = fma_(p, r, 0.5);
    p = fma_(p, r, 1.0);
    p = fma_(p, r, 1.0);
    return p * as_double(((int64_t)(int32_t)n + 1023) << 52);
}

MONARCH_INLINE float pow_(float x, float y) {
    const float inf = __builtin_inff();
    float a = __builtin_fabsf(x);
    double l = log2_of((double)a);
    l = a == 0.0f ? (double)-inf : l;
    l = a == inf ? (double)inf : l;
    float result = (float)exp2_of((double)y * l);
    bool whole = __builtin_floorf(y) == y;
    bool odd = whole & (__builtin_floorf(y * 0.5f) != y * 0.5f);
    result = odd & (as_bits(x) < 0) ? -result : result;
    result = (x < 0.0f) & (x > -inf) & !whole ? __builtin_nanf("") : result;
    result = (x != x) | (y != y) ? x + y : result;
    return (y == 0.0f) | (x == 1.0f) | ((x == -1.0f) & (__builtin_fabsf(y) == inf)) ? 1.0f : result;
}

// -- sin and cos, in float64 -------------------------------------------------------------------------------------------

static const uint32_t two_over_pi[8] = {0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0,
                                        0xdb629599, 0x3c439041, 0xfe5163ab, 0xdebbc561};

// x = n pi/2 + r, n modulo 4. From 2^25 on, n and r come from the product of the mantissa with those bits of 2/pi that
// tell n modulo 4 and 62 bits more.
MONARCH_INLINE int64_t circle_reduce(float x, double& r) {
    double c = __builtin_fabsf(x) < 0x1p25f ? (double)x : 0.0, near = __builtin_rint(c * 0x1.45f306dc9c883p-1);
    double small = fma_(near, -0x1.1a62633145c07p-54, fma_(near, -0x1.921fb54442d18p+0, c));
    int32_t bits = as_bits(x) & 0x7fffffff, e = (bits >> 23) - 152;  // |x| = mantissa * 2^(e + 2)
    e = e < 0 ? 0 : e;
    e = e > 102 ? 102 : e;
    uint64_t mantissa = (uint64_t)(uint32_t)((bits & 0x7fffff) | 0x800000);
    int32_t at = e >> 5, by = e & 31;
    uint64_t w0 = two_over_pi[at], w1 = two_over_pi[at + 1], w2 = two_over_pi[at + 2], w3 = two_over_pi[at + 3];
    uint64_t c0 = (((w0 << 32 | w1) << by) >> 32), c1 = (((w1 << 32 | w2) << by) >> 32);
    uint64_t c2 = (((w2 << 32 | w3) << by) >> 32);
    uint64_t product = (mantissa * c0 << 32) + mantissa * c1 + (mantissa * c2 >> 32);
    uint64_t turns = (product + (1ull << 61)) >> 62;
    double large = (double)(int64_t)(product - (turns << 62)) * (0x1p-62 * 0x1.921fb54442d18p+0);
    bool far = __builtin_fabsf(x) >= 0x1p25f, negative = x < 0.0f;
    r = far ? (negative ? -large : large) : small;
    return far ? (negative ? -(int64_t)turns : (int64_t)turns) : (int64_t)(int32_t)near;
}

MONARCH_INLINE float circle(float x, int64_t ahead) {
    double r;
    int64_t n = circle_reduce(x, r) + ahead;
    double s = r * r, p = -1.0 / 39916800.0, q = 1.0 / 479001600.0;
    p = fma_(p, s, 1.0 / 362880.0);
    p = fma_(p, s, -1.0 / 5040.0);
    p = fma_(p, s, 1.0 / 120.0);
    p = fma_(p, s, -1.0 / 6.0);
    p = fma_(p * s, r, r);
    q = fma_(q, s, -1.0 / 3628800.0);
    q = fma_(q, s, 1.0 / 40320.0);
    q = fma_(q, s, -1.0 / 720.0);
    q = fma_(q, s, 1.0 / 24.0);
    q = fma_(q, s, -0.5);
    q = fma_(q, s, 1.0);
    double value = n & 1 ? q : p;
    value = n & 2 ? -value : value;
    return __builtin_fabsf(x) < __builtin_inff() ? (float)value : __builtin_nanf("");
}

MONARCH_INLINE float sin_(float x) { float y = circle(x, 0); return x == 0.0f ? x : y; }
MONARCH_INLINE float cos_(float x) { return circle(x, 1); }

// -- the rest ----------------------------------------------------------------------------------------------------------

MONARCH_INLINE float sqrt_(float x) { return __builtin_sqrtf(x); }
MONARCH_INLINE float floor_(float x) { return __builtin_floorf(x); }
MONARCH_INLINE float ceil_(float x) { return __builtin_ceilf(x); }
MONARCH_INLINE float round_(float x) { return __builtin_nearbyintf(x); }
MONARCH_INLINE float trunc_(float x) { return __builtin_truncf(x); }
MONARCH_INLINE float abs_(float x) { return __builtin_fabsf(x); }

MONARCH_INLINE double exp_(double x) { return __builtin_exp(x); }
MONARCH_INLINE double expm1_(double x) { return __builtin_expm1(x); }
MONARCH_INLINE double log_(double x) { return __builtin_log(x); }
MONARCH_INLINE double log1p_(double x) { return __builtin_log1p(x); }
MONARCH_INLINE double tanh_(double x) { return __builtin_tanh(x); }
MONARCH_INLINE double erf_(double x) { return __builtin_erf(x); }
MONARCH_INLINE double sin_(double x) { return __builtin_sin(x); }
MONARCH_INLINE double cos_(double x) { return __builtin_cos(x); }
MONARCH_INLINE double pow_(double x, double y) { return __builtin_pow(x, y); }
MONARCH_INLINE double sqrt_(double x) { return __builtin_sqrt(x); }
MONARCH_INLINE double floor_(double x) { return __builtin_floor(x); }
MONARCH_INLINE double ceil_(double x) { return __builtin_ceil(x); }
MONARCH_INLINE double round_(double x) { return __builtin_nearbyint(x); }
MONARCH_INLINE double trunc_(double x) { return __builtin_trunc(x); }
MONARCH_INLINE double abs_(double x) { return __builtin_fabs(x); }
MONARCH_INLINE double sigmoid_(double x) {
    double e = __builtin_exp(-__builtin_fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

MONARCH_INLINE int32_t abs_(int32_t x) { return x < 0 ? -x : x; }
MONARCH_INLINE int64_t abs_(int64_t x) { return x < 0 ? -x : x; }
MONARCH_INLINE int32_t max_(int32_t a, int32_t b) { return a > b ? a : b; }
MONARCH_INLINE int64_t max_(int64_t a, int64_t b) { return a > b ? a : b; }
MONARCH_INLINE int32_t min_(int32_t a, int32_t b) { return a < b ? a : b; }
MONARCH_INLINE int64_t min_(int64_t a, int64_t b) { return a < b ? a : b; }

// Of two of which one is NaN, a comparison picks b; so only where a is NaN is it to be put right.
MONARCH_INLINE float max_(float a, float b) { float m = a > b ? a : b; return a != a ? a : m; }
MONARCH_INLINE double max_(double a, double b) { double m = a > b ? a : b; return a != a ? a : m; }
MONARCH_INLINE float min_(float a, float b) { float m = a < b ? a : b; return a != a ? a : m; }
MONARCH_INLINE double min_(double a, double b) { double m = a < b ? a : b; return a != a ? a : m; }
