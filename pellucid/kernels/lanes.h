// 16 numbers at a time, on every processor: what the kernels are written in.
//
// Sums are float32, each multiplication and addition is written as one `fma`, and the compiler may contract nothing by itself.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <omp.h>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) || defined(PELLUCID_EMULATE_PAIRS)
#define PAIRS 1
#else
#define PAIRS 0
#endif

namespace {

constexpr int LANES = 16;
using bfloat16 = uint16_t;

#if defined(__AVX2__) && defined(__FMA__)
inline __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 eight(const bfloat16* p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
#endif

// `ROWS`: how many rows of 16 columns are summed in registers at a time.

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define WIDE 1
constexpr int ROWS = 12, QUERIES = 12, CHAINS = 4;
struct Vec { __m512 v; };
struct Words { __m512i v; };
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec all(float a) { return {_mm512_set1_ps(a)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec least(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec most(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec zero_below(Vec x, Vec at, Vec a) {  // 0 where at <= a, else x
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(at.v, a.v, _CMP_NLE_UQ), x.v)};
}
inline Vec rounded(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec power_of_two(Vec n) {  // of integers
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline Words words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Vec nibble(Words w, int i) {  // level i of each word
    __m512i n = _mm512_and_si512(_mm512_srli_epi32(w.v, 4 * i), _mm512_set1_epi32(15));
    return {_mm512_cvtepi32_ps(n)};
}
inline Vec byte(Words w, int i) {  // signed
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - 8 * i), 24))};
}
inline Vec widen(const bfloat16* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
constexpr int DOT_ROWS = 6, DOT_STEP = 16;  // of plain weights
struct Dot { __m512 v; };
inline Dot dot_zero() { return {_mm512_setzero_ps()}; }
inline Dot dot_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Dot dot_load(const bfloat16* p) { return {widen(p).v}; }
inline Dot fma(Dot a, Dot b, Dot c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Dot kept(Dot a) {  // in a register: the compiler would load it again for each product
    asm("" : "+v"(a.v));
    return a;
}
inline __m256 fold(Dot a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
inline void sums_of_four(const Dot* a, float* out) {
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(fold(a[0]), fold(a[1])), _mm256_hadd_ps(fold(a[2]), fold(a[3])));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int ROWS = 6, QUERIES = 6, CHAINS = 2;
struct Vec { __m256 a, b; };
struct Words { __m256i a, b; };
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec least(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec most(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec zero_below(Vec x, Vec at, Vec y) {
    return {_mm256_and_ps(_mm256_cmp_ps(at.a, y.a, _CMP_NLE_UQ), x.a), _mm256_and_ps(_mm256_cmp_ps(at.b, y.b, _CMP_NLE_UQ), x.b)};
}
inline Vec rounded(Vec x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec power_of_two(Vec n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline Words words(const uint8_t* p) {
    const __m256i* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline __m256 nibble(__m256i w, int i) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, 4 * i), _mm256_set1_epi32(15)));
}
inline Vec nibble(Words w, int i) { return {nibble(w.a, i), nibble(w.b, i)}; }
inline __m256 byte(__m256i w, int i) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * i), 24));
}
inline Vec byte(Words w, int i) { return {byte(w.a, i), byte(w.b, i)}; }
inline Vec widen(const bfloat16* p) { return {eight(p), eight(p + 8)}; }
constexpr int DOT_ROWS = 3, DOT_STEP = 8;
struct Dot { __m256 v; };
inline Dot dot_zero() { return {_mm256_setzero_ps()}; }
inline Dot dot_load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Dot dot_load(const bfloat16* p) { return {eight(p)}; }
inline Dot fma(Dot a, Dot b, Dot c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Dot kept(Dot a) {
    asm("" : "+x"(a.v));
    return a;
}
inline void sums_of_four(const Dot* a, float* out) {
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#else
constexpr int ROWS = 4, QUERIES = 4, CHAINS = 1;
struct Vec { float v[LANES]; };
struct Words { uint32_t v[LANES]; };
template <class F> inline Vec each(F f) {
    Vec out;
    for (int i = 0; i < LANES; i++) out.v[i] = f(i);
    return out;
}
inline Vec load(const float* p) { return each([&](int i) { return p[i]; }); }
inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec all(float a) { return each([&](int) { return a; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
inline Vec operator+(Vec a, Vec b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec operator-(Vec a, Vec b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec operator*(Vec a, Vec b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec operator/(Vec a, Vec b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec least(Vec a, Vec b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec most(Vec a, Vec b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec zero_below(Vec x, Vec at, Vec a) { return each([&](int i) { return at.v[i] <= a.v[i] ? 0.0f : x.v[i]; }); }
inline Vec rounded(Vec a) { return each([&](int i) { return std::nearbyintf(a.v[i]); }); }
inline Vec power_of_two(Vec n) { return each([&](int i) { return std::isnan(n.v[i]) ? n.v[i] : std::ldexp(1.0f, int(n.v[i])); }); }
inline Words words(const uint8_t* p) {
    Words out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline Vec nibble(Words w, int n) { return each([&](int i) { return float(w.v[i] >> 4 * n & 15); }); }
inline Vec byte(Words w, int n) { return each([&](int i) { return float(int8_t(w.v[i] >> 8 * n)); }); }
inline Vec widen(const bfloat16* p) {
    return each([&](int i) {
        uint32_t bits = uint32_t(p[i]) << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
}
constexpr int DOT_ROWS = 1, DOT_STEP = LANES;
using Dot = Vec;
inline Dot kept(Dot a) { return a; }
inline Dot dot_zero() { return all(0); }
inline Dot dot_load(const float* p) { return load(p); }
inline Dot dot_load(const bfloat16* p) { return widen(p); }
inline void sums_of_four(const Dot* a, float* out) {
    for (int i = 0; i < 4; i++) {
        out[i] = 0;
        for (float x : a[i].v) out[i] += x;
    }
}
#endif

inline float widen_one(bfloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline bfloat16 narrow_one(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return bfloat16(bits >> 16 | 64);
    return bfloat16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX2__) && defined(__FMA__)
inline float sum(__m256 x) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
#endif
#if defined(WIDE)
inline float sum(Vec a) { return sum(fold({a.v})); }
#elif defined(__AVX2__) && defined(__FMA__)
inline float sum(Vec x) { return sum(_mm256_add_ps(x.a, x.b)); }
#else
inline float sum(Vec a) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
    return a.v[0];
}
#endif

inline float maximum(Vec a) {
    float v[LANES];
    store(v, a);
    return *std::max_element(v, v + LANES);
}

#if defined(__AVX2__) && defined(__FMA__)
inline __m256i narrow_eight(__m256 x) {  // `narrow_one` of each, in 32 bits
    const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16), one = _mm256_set1_epi32(1);
    const __m256i ties = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, one));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(_mm256_add_epi32(bits, ties), 16), _mm256_or_si256(upper, _mm256_set1_epi32(64)), nan);
}
#endif
inline void narrow(bfloat16* to, Vec a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a.v));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(WIDE)
    const __m256i both = _mm256_packus_epi32(narrow_eight(a.a), narrow_eight(a.b));  // by halves of 128 bits
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
#else
    float v[LANES];
    store(v, a);
    for (int i = 0; i < LANES; i++) to[i] = narrow_one(v[i]);
#endif
}

// e^x, to about 1e-7; 0 below -87
inline Vec exponential(Vec x) {
    const Vec lowest = all(-87.0f);
    Vec inside = least(all(88.3f), most(lowest, x));
    Vec n = rounded(inside * all(1.44269504f));
    Vec r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), inside));
    Vec p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) p = fma(p, r, all(c));
    p = fma(p, r * r, r) + all(1.0f);
    return zero_below(p * power_of_two(n), x, lowest);
}

// Scores of keys begin ... end to their shares, before they are divided by the sum whose inverse comes back
inline float soften(float* s, int64_t begin, int64_t end) {
    const int64_t from = begin / LANES * LANES, until = (end + LANES - 1) / LANES * LANES;
    std::fill(s + from, s + begin, -INFINITY);
    std::fill(s + end, s + until, -INFINITY);
    Vec top = all(-INFINITY), total = all(0);
    for (int64_t key = from; key < until; key += LANES) top = most(load(s + key), top);
    const Vec highest = all(maximum(top));
    for (int64_t key = from; key < until; key += LANES) {
        const Vec e = exponential(load(s + key) - highest);
        store(s + key, e), total = total + e;
    }
    return 1.0f / sum(total);
}

// Numbers of a cache, in either type
inline Vec cached(const float* p) { return load(p); }
inline Vec cached(const bfloat16* p) { return widen(p); }
inline float widened(float x) { return x; }
inline float widened(bfloat16 x) { return widen_one(x); }
inline void put(float* p, float x) { *p = x; }
inline void put(bfloat16* p, float x) { *p = narrow_one(x); }

// 16 rows of weights, each of which may stand anywhere
template <class W> struct Rows16 {
    const W* at[LANES];
    Rows16() = default;
    Rows16(const W* first, int64_t stride, int64_t count = LANES) {  // the last of `count` again where there are fewer
        for (int64_t i = 0; i < LANES; i++) at[i] = first + std::min(i, count - 1) * stride;
    }
};

#if defined(__AVX2__) && defined(__FMA__)
// 8 numbers of 8 rows, as columns
template <class W> inline void turn(const W* const* rows, int64_t k, float* to) {
    __m256 a[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) a[i] = eight(rows[i] + k);
    for (int i = 0; i < 8; i += 2) pairs[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), pairs[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}
#else
template <class W> inline void turn(const W* const* rows, int64_t k, float* to) {
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 8; i++) to[j * LANES + i] = widened(rows[i][k + j]);
}
#endif

// `depth` numbers, a multiple of 8, of 16 rows, as columns [depth, 16]
template <class W> inline void put_columns(const Rows16<W>& rows, int64_t depth, float* to) {
    for (int64_t k = 0; k < depth; k += 8, to += 8 * LANES) turn(rows.at, k, to), turn(rows.at + 8, k, to + 8);
}

// Room that is written before it is read
using Floats = std::unique_ptr<float[]>;
inline Floats floats(int64_t count) { return Floats(new float[count]); }

}  // namespace
