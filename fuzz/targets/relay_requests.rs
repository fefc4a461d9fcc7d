//! HTTP requests of one connection, cut anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pepo_fuzz::relay_requests(bytes));

libfuzzer_sys::fuzz_mutator!(|input: &mut [u8], size: usize, most: usize, chance: u32| {
    pepo_fuzz::mutate(pepo_fuzz::RELAY_REQUESTS, input, size, most, chance)
});
