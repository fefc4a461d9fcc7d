//! What strangers send over HTTP: any bytes as any body.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pepo_fuzz::api_bodies(bytes));

libfuzzer_sys::fuzz_mutator!(|input: &mut [u8], size: usize, most: usize, chance: u32| {
    pepo_fuzz::mutate(pepo_fuzz::API_BODIES, input, size, most, chance)
});
