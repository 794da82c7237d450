// Insertion of latents into the paged cache: rows of [latent | k_pe] are copied as they are.
#include <cstdint>
#include <cstring>

// All strides and lengths in bytes; a negative row is padding, and nothing is written for it.
extern "C" void k3hal_cache_insert(const char *latent, long latent_stride, long latent_bytes, const char *k_pe,
                                   long k_pe_stride, long k_pe_bytes, char *cache, long page_stride, long row_stride,
                                   long page_tokens, const int64_t *rows, long count) {
    for (long t = 0; t < count; t++) {
        if (rows[t] < 0) continue;
        char *to = cache + rows[t] / page_tokens * page_stride + rows[t] % page_tokens * row_stride;
        std::memcpy(to, latent + t * latent_stride, latent_bytes);
        std::memcpy(to + latent_bytes, k_pe + t * k_pe_stride, k_pe_bytes);
    }
}
