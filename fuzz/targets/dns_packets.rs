//! What guests ask for names, and what comes back from upstream.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pepo_fuzz::dns_packets(bytes));

libfuzzer_sys::fuzz_mutator!(|input: &mut [u8], size: usize, most: usize, chance: u32| {
    pepo_fuzz::mutate(pepo_fuzz::DNS_PACKETS, input, size, most, chance)
});
